//! The addresses of the cluster's DNS.

use std::net::IpAddr;
use std::str::FromStr;

use thiserror::Error;

/// One address, or one of each family; queries go on to the first one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClusterDns {
    first: IpAddr,
    second: Option<IpAddr>,
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
