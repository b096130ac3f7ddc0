//! The operator's CA, kept in a Secret that the first operator creates, and each operator's own certificate.

use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, Client};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use thiserror::Error;
use thuban_api::SYSTEM_NAMESPACE;
use thuban_proto::OPERATOR_TLS_NAME;

const SECRET: &str = "thuban-operator-ca";
const CERTIFICATE: &str = "tls.crt";
const KEY: &str = "tls.key";

#[derive(Debug, Error)]
pub enum TlsError {
    #[error("secret {SYSTEM_NAMESPACE}/{SECRET}: {0}")]
    Secret(#[source] kube::Error),
    #[error("secret {SYSTEM_NAMESPACE}/{SECRET} lacks {0}; delete it, so that a new CA is made")]
    Incomplete(&'static str),
    #[error("certificate: {0}; delete secret {SYSTEM_NAMESPACE}/{SECRET}, so that a new CA is made")]
    Certificate(#[from] rcgen::Error),
}

/// PEM texts that the server needs, and by which clients verify it.
pub struct ServerTls {
    pub ca_bundle: String,
    pub certificate: String,
    pub key: String,
}

/// Loads the CA, or makes it (the API server lets one creator win), and signs a certificate for this process.
pub async fn prepare(client: Client) -> Result<ServerTls, TlsError> {
    let secrets: Api<Secret> = Api::namespaced(client, SYSTEM_NAMESPACE);
    let secret = match secrets.get_opt(SECRET).await.map_err(TlsError::Secret)? {
        Some(secret) => secret,
        None => match secrets.create(&PostParams::default(), &new_ca()?).await {
            Ok(secret) => secret,
            Err(kube::Error::Api(status)) if status.code == 409 => {
                secrets.get(SECRET).await.map_err(TlsError::Secret)?
            }
            Err(error) => return Err(TlsError::Secret(error)),
        },
    };
    let text = |name| {
        let bytes = secret
            .data
            .as_ref()
            .and_then(|data| data.get(name))
            .ok_or(TlsError::Incomplete(name))?;
        String::from_utf8(bytes.0.clone()).map_err(|_| TlsError::Incomplete(name))
    };
    sign(text(CERTIFICATE)?, &text(KEY)?)
}

fn sign(ca_bundle: String, ca_key: &str) -> Result<ServerTls, TlsError> {
    let issuer = Issuer::from_ca_cert_pem(&ca_bundle, KeyPair::from_pem(ca_key)?)?;
    let mut parameters = CertificateParams::new(vec![OPERATOR_TLS_NAME.to_owned()])?;
    parameters
        .distinguished_name
        .push(DnType::CommonName, OPERATOR_TLS_NAME);
    parameters
        .extended_key_usages
        .push(ExtendedKeyUsagePurpose::ServerAuth);
    parameters.use_authority_key_identifier_extension = true;
    let key = KeyPair::generate()?;
    let certificate = parameters.signed_by(&key, &issuer)?.pem();
    Ok(ServerTls {
        ca_bundle,
        certificate,
        key: key.serialize_pem(),
    })
}

fn new_ca() -> Result<Secret, TlsError> {
    let mut parameters = CertificateParams::new(Vec::new())?;
    parameters.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    parameters
        .distinguished_name
        .push(DnType::CommonName, "thuban-operator-ca");
    parameters.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate()?;
    let certificate = parameters.self_signed(&key)?.pem();
    let data = [
        (CERTIFICATE.to_owned(), ByteString(certificate.into_bytes())),
        (KEY.to_owned(), ByteString(key.serialize_pem().into_bytes())),
    ];
    Ok(Secret {
        metadata: ObjectMeta {
            name: Some(SECRET.into()),
            namespace: Some(SYSTEM_NAMESPACE.into()),
            ..ObjectMeta::default()
        },
        data: Some(data.into()),
        type_: Some("kubernetes.io/tls".into()),
        ..Secret::default()
    })
}

#[cfg(test)]
mod tests {
    use super::{CERTIFICATE, KEY, new_ca, sign};

    #[test]
    fn a_certificate_is_signed_by_the_ca_of_the_secret() {
        let data = new_ca().unwrap().data.unwrap();
        let text = |name: &str| String::from_utf8(data[name].0.clone()).unwrap();
        let tls = sign(text(CERTIFICATE), &text(KEY)).unwrap();
        assert!(tls.certificate.contains("BEGIN CERTIFICATE") && tls.key.contains("PRIVATE KEY"));
        assert_ne!(tls.certificate, tls.ca_bundle);
    }
}
