//! The cluster's DNS: its addresses, and its Service.

use std::net::IpAddr;
use std::str::FromStr;

use thiserror::Error;

/// One address, or one of each family; queries go on to the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterDns {
    first: IpAddr,
    second: Option<IpAddr>,
}

/// The Service of the cluster's DNS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DnsService {
    pub namespace: String,
    pub name: String,
}

/// The name that Kubernetes gives to the Service of cluster DNS.
pub const USUAL_DNS_SERVICE: &str = "kube-system/kube-dns";

#[derive(Debug, Error, PartialEq, Eq)]
#[error("{0:?} is no Service, expected NAMESPACE/NAME such as kube-system/kube-dns")]
pub struct DnsServiceError(String);

impl FromStr for DnsService {
    type Err = DnsServiceError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.trim().split_once('/') {
            Some((namespace, name)) if !namespace.is_empty() && !name.is_empty() && !name.contains('/') => {
                Ok(Self {
                    namespace: namespace.to_owned(),
                    name: name.to_owned(),
                })
            }
            _ => Err(DnsServiceError(text.to_owned())),
        }
    }
}

#[derive(Debug, Error, PartialEq, Eq)]
pub enum ClusterDnsError {
    #[error("{0:?} is no IP address, expected one such as 10.96.0.10")]
    NoAddress(String),
    #[error("expected one address, or one of each family with a comma between them")]
    Families,
}

impl ClusterDns {
    pub const fn new(first: IpAddr) -> Self {
        Self { first, second: None }
    }

    /// Returns the address that queries go on to.
    pub const fn upstream(self) -> IpAddr {
        self.first
    }

    pub fn addresses(self) -> impl Iterator<Item = IpAddr> {
        [self.first].into_iter().chain(self.second)
    }
}

impl FromStr for ClusterDns {
    type Err = ClusterDnsError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parse = |text: &str| {
            let address: Result<IpAddr, _> = text.trim().parse();
            address.map_err(|_| ClusterDnsError::NoAddress(text.trim().to_owned()))
        };
        let addresses: Vec<IpAddr> = text.split(',').map(parse).collect::<Result<_, _>>()?;
        match addresses[..] {
            [first] => Ok(Self::new(first)),
            [first, second] if first.is_ipv4() != second.is_ipv4() => Ok(Self {
                first,
                second: Some(second),
            }),
            _ => Err(ClusterDnsError::Families),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dns_service_has_a_namespace_and_a_name() {
        let usual: DnsService = USUAL_DNS_SERVICE.parse().unwrap();
        assert_eq!((&*usual.namespace, &*usual.name), ("kube-system", "kube-dns"));
        for wrong in ["kube-dns", "/kube-dns", "kube-system/", "a/b/c", ""] {
            assert_eq!(wrong.parse::<DnsService>(), Err(DnsServiceError(wrong.into())));
        }
    }

    #[test]
    fn addresses_are_one_of_each_family_at_most() {
        let read = |text: &str| text.parse::<ClusterDns>();
        let both = read("10.96.0.10, fd00:96::a").unwrap();
        assert_eq!(both.upstream(), IpAddr::from([10, 96, 0, 10]));
        assert_eq!(both.addresses().count(), 2);
        assert_eq!(read("fd00:96::a").unwrap().addresses().count(), 1);
        for wrong in ["10.96.0.10,10.96.0.11", "10.96.0.10,fd00::1,fd00::2"] {
            assert_eq!(read(wrong), Err(ClusterDnsError::Families));
        }
        assert_eq!(
            read("kube-dns"),
            Err(ClusterDnsError::NoAddress("kube-dns".into()))
        );
        assert!(read("").is_err());
    }
}
