//! The certificate of a server, which can be exchanged while connections are open: those stay, and later connections
//! get the new one.

use std::sync::{Arc, PoisonError, RwLock};

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

/// The certificate that this process shows to its clients.
#[derive(Debug)]
pub struct ServerCertificate(RwLock<Arc<CertifiedKey>>);

impl ServerCertificate {
    pub fn new(certificate: Arc<CertifiedKey>) -> Self {
        Self(RwLock::new(certificate))
    }

    pub fn exchange(&self, certificate: Arc<CertifiedKey>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = certificate;
    }
}

impl ResolvesServerCert for ServerCertificate {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.0.read().unwrap_or_else(PoisonError::into_inner).clone())
    }
}
