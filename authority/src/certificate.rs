//! Makes and reads CA certificates, and signs certificates of servers and clients.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose, PublicKeyData,
};
use rustls::crypto::ring::sign::any_supported_type;
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use rustls::sign::CertifiedKey;
use thiserror::Error;
use time::OffsetDateTime;
use x509_parser::pem::parse_x509_pem;

use super::rotation::Life;

#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("the certificate is no PEM text of an X.509 certificate")]
    Unreadable,
    #[error("the certificate is not of a CA")]
    NoCa,
    #[error("the key is not the certificate's")]
    OtherKey,
    #[error(transparent)]
    Make(#[from] rcgen::Error),
    #[error(transparent)]
    Use(#[from] rustls::Error),
}

/// A CA with its key.
#[derive(Clone)]
pub struct Ca {
    /// PEM.
    pub certificate: String,
    /// PEM.
    pub key: String,
    pub life: Life,
}

fn time(seconds: u64) -> OffsetDateTime {
    let seconds = i64::try_from(seconds).unwrap_or(i64::MAX);
    OffsetDateTime::from_unix_timestamp(seconds).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

impl Ca {
    /// Makes a CA that is valid from now on.
    pub fn make(name: &str, now: u64) -> Result<Self, CertificateError> {
        let life = Life::begin(now);
        let mut parameters = CertificateParams::new(Vec::new())?;
        parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        (parameters.not_before, parameters.not_after) = (time(life.from), time(life.to));
        let key = KeyPair::generate()?;
        Ok(Self {
            certificate: parameters.self_signed(&key)?.pem(),
            key: key.serialize_pem(),
            life,
        })
    }

    /// Reads a CA, and checks that the key is the certificate's.
    pub fn read(certificate: String, key: String) -> Result<Self, CertificateError> {
        let (life, public_key) = read(&certificate)?;
        if KeyPair::from_pem(&key)?.subject_public_key_info() != public_key {
            return Err(CertificateError::OtherKey);
        }
        Ok(Self {
            certificate,
            key,
            life,
        })
    }

    /// Signs a certificate for this process as a server; its key is in no other place. The certificate is valid for as
    /// long as the CA is.
    pub fn sign(&self, name: &str) -> Result<Arc<CertifiedKey>, CertificateError> {
        self.sign_for(name, ExtendedKeyUsagePurpose::ServerAuth)
    }

    /// Does what [`Self::sign`] does, for this process as a client.
    pub fn sign_client(&self, name: &str) -> Result<Arc<CertifiedKey>, CertificateError> {
        self.sign_for(name, ExtendedKeyUsagePurpose::ClientAuth)
    }

    fn sign_for(
        &self,
        name: &str,
        usage: ExtendedKeyUsagePurpose,
    ) -> Result<Arc<CertifiedKey>, CertificateError> {
        let issuer = Issuer::from_ca_cert_pem(&self.certificate, KeyPair::from_pem(&self.key)?)?;
        let mut parameters = CertificateParams::new(vec![name.to_owned()])?;
        parameters.distinguished_name.push(DnType::CommonName, name);
        parameters.extended_key_usages.push(usage);
        parameters.use_authority_key_identifier_extension = true;
        (parameters.not_before, parameters.not_after) = (time(self.life.from), time(self.life.to));
        let key = KeyPair::generate()?;
        let certificate = parameters.signed_by(&key, &issuer)?.der().clone();
        let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
        Ok(Arc::new(CertifiedKey::new(
            vec![certificate],
            any_supported_type(&key)?,
        )))
    }
}

/// Whether the text is the certificate of a CA.
pub fn is_ca(certificate: &str) -> bool {
    read(certificate).is_ok()
}

/// Returns the life of a CA, and its public key in the form of a certificate.
fn read(certificate: &str) -> Result<(Life, Vec<u8>), CertificateError> {
    let (_, pem) = parse_x509_pem(certificate.as_bytes()).map_err(|_| CertificateError::Unreadable)?;
    let parsed = pem.parse_x509().map_err(|_| CertificateError::Unreadable)?;
    if !parsed.is_ca() {
        return Err(CertificateError::NoCa);
    }
    let seconds = |seconds: i64| u64::try_from(seconds).unwrap_or_default();
    let validity = parsed.validity();
    let life = Life {
        from: seconds(validity.not_before.timestamp()),
        to: seconds(validity.not_after.timestamp()),
    };
    Ok((life, parsed.public_key().raw.to_vec()))
}
