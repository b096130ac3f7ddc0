//! Rules of ranges across objects; every error names the field and what was expected.

use std::net::Ipv4Addr;

use thiserror::Error;
use thuban_api::cidr::{Cidr, CidrError};

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RangeError {
    #[error("spec.cidrs: {0}")]
    Malformed(String),
    #[error("spec.cidrs: {cidr} touches {refused} ({what}); choose a range outside of it")]
    Refused { cidr: Cidr, refused: Cidr, what: String },
    #[error("spec.cidrs: {cidr} contains the address {address} of node {node}; choose a range without it")]
    NodeAddress {
        cidr: Cidr,
        address: Ipv4Addr,
        node: String,
    },
    #[error("spec.cidrs: {cidr} overlaps {other} of the same object")]
    Itself { cidr: Cidr, other: Cidr },
    #[error("spec.cidrs: {cidr} lies in none of the ranges of VPC {vpc:?}: {ranges}")]
    OutsideVpc { cidr: Cidr, vpc: String, ranges: String },
    #[error("spec.cidrs: {cidr} overlaps {other} of network {network:?} in the same VPC")]
    Sibling {
        cidr: Cidr,
        other: Cidr,
        network: String,
    },
    #[error("spec.vpc: VPC {0:?} does not exist; create it or name another")]
    NoVpc(String),
    #[error("spec.vpc: VPC {0:?} was not accepted; see its conditions")]
    VpcNotAccepted(String),
}

impl RangeError {
    /// CamelCase reason of the condition and the event.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Malformed(_) => "InvalidCidr",
            Self::Refused { .. } | Self::NodeAddress { .. } => "RangeRefused",
            Self::Itself { .. } | Self::Sibling { .. } => "RangeOverlaps",
            Self::OutsideVpc { .. } => "OutsideVpc",
            Self::NoVpc(_) => "VpcNotFound",
            Self::VpcNotAccepted(_) => "VpcNotAccepted",
        }
    }
}

/// Ranges that nobody may use: (range, what it is).
#[derive(Clone, Debug, Default)]
pub struct RefusedRanges(Vec<(Cidr, String)>);

impl RefusedRanges {
    /// These, and one more: `what` says why.
    #[must_use]
    pub fn and(&self, range: Cidr, what: &str) -> Self {
        let mut ranges = self.0.clone();
        ranges.push((range, what.to_owned()));
        Self(ranges)
    }

    /// The fixed ones, the services' and the underlay's.
    pub fn new(services: &[Cidr], underlay: &[Cidr]) -> Result<Self, CidrError> {
        let fixed = [
            ("127.0.0.0/8", "loopback"),
            ("169.254.0.0/16", "link-local"),
            ("224.0.0.0/4", "multicast"),
            ("240.0.0.0/4", "reserved"),
            ("0.0.0.0/8", "this network"),
        ];
        let mut ranges = Vec::new();
        for (range, what) in fixed {
            ranges.push((range.parse()?, what.to_owned()));
        }
        ranges.extend(
            services
                .iter()
                .map(|range| (*range, "service addresses of the cluster".to_owned())),
        );
        ranges.extend(
            underlay
                .iter()
                .map(|range| (*range, "addresses of nodes and underlay".to_owned())),
        );
        Ok(Self(ranges))
    }
}

/// Reads the ranges of an object.
pub fn parse(cidrs: &[String]) -> Result<Vec<Cidr>, RangeError> {
    let parsed: Result<Vec<Cidr>, CidrError> = cidrs.iter().map(|text| text.parse()).collect();
    let parsed = parsed.map_err(|error| RangeError::Malformed(error.to_string()))?;
    if parsed.is_empty() {
        return Err(RangeError::Malformed(
            "expected at least one range such as 10.0.0.0/16".into(),
        ));
    }
    for (index, cidr) in parsed.iter().enumerate() {
        if let Some(other) = parsed[..index].iter().find(|other| other.overlaps(*cidr)) {
            return Err(RangeError::Itself {
                cidr: *cidr,
                other: *other,
            });
        }
    }
    Ok(parsed)
}

/// A VPC's ranges against those that are refused and the nodes' addresses.
pub fn vpc(
    cidrs: &[String],
    refused: &RefusedRanges,
    nodes: &[(String, Ipv4Addr)],
) -> Result<Vec<Cidr>, RangeError> {
    let ranges = parse(cidrs)?;
    for cidr in &ranges {
        if let Some((range, what)) = refused.0.iter().find(|(range, _)| range.overlaps(*cidr)) {
            return Err(RangeError::Refused {
                cidr: *cidr,
                refused: *range,
                what: what.clone(),
            });
        }
        if let Some((node, address)) = nodes.iter().find(|(_, address)| cidr.contains_address(*address)) {
            return Err(RangeError::NodeAddress {
                cidr: *cidr,
                address: *address,
                node: node.clone(),
            });
        }
    }
    Ok(ranges)
}

/// A network's ranges against its VPC's and those of its siblings: (name, ranges).
pub fn network(
    cidrs: &[String],
    vpc: (&str, &[String]),
    siblings: &[(String, Vec<String>)],
) -> Result<Vec<Cidr>, RangeError> {
    let ranges = parse(cidrs)?;
    let vpc_ranges = parse(vpc.1).map_err(|_| RangeError::VpcNotAccepted(vpc.0.to_owned()))?;
    for cidr in &ranges {
        if !vpc_ranges.iter().any(|range| range.contains(*cidr)) {
            let ranges = vpc.1.join(", ");
            return Err(RangeError::OutsideVpc {
                cidr: *cidr,
                vpc: vpc.0.to_owned(),
                ranges,
            });
        }
        for (name, others) in siblings {
            let others = others.iter().filter_map(|text| text.parse::<Cidr>().ok());
            if let Some(other) = others.into_iter().find(|other| other.overlaps(*cidr)) {
                return Err(RangeError::Sibling {
                    cidr: *cidr,
                    other,
                    network: name.clone(),
                });
            }
        }
    }
    Ok(ranges)
}

#[cfg(test)]
mod tests {
    use super::{RangeError, RefusedRanges, network, vpc};

    fn strings(texts: &[&str]) -> Vec<String> {
        texts.iter().map(|text| (*text).to_owned()).collect()
    }

    fn refused() -> RefusedRanges {
        RefusedRanges::new(
            &["10.96.0.0/16".parse().unwrap()],
            &["172.31.77.0/24".parse().unwrap()],
        )
        .unwrap()
    }

    #[test]
    fn refused_ranges_are_named() {
        let nodes = [("n1".to_owned(), [192, 168, 1, 5].into())];
        let check = |cidr: &str| {
            vpc(&strings(&[cidr]), &refused(), &nodes)
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        assert_eq!(check("10.0.0.0/16"), Ok(()));
        for (cidr, word) in [
            ("10.96.4.0/24", "10.96.0.0/16"),
            ("10.0.0.0/8", "10.96.0.0/16"),
            ("172.31.0.0/16", "172.31.77.0/24"),
            ("127.0.0.0/16", "127.0.0.0/8"),
            ("169.254.3.0/24", "169.254.0.0/16"),
            ("224.1.0.0/16", "multicast"),
            ("192.168.0.0/16", "n1"),
            ("10.0.0.1/16", "10.0.0.0/16"),
            ("banana", "banana"),
        ] {
            let error = check(cidr).expect_err(cidr);
            assert!(
                error.starts_with("spec.cidrs") && error.contains(word),
                "{cidr}: {error}"
            );
        }
    }

    #[test]
    fn networks_lie_in_their_vpc_and_beside_their_siblings() {
        let ranges = strings(&["10.0.0.0/16"]);
        let siblings = [("web".to_owned(), strings(&["10.0.1.0/24"]))];
        let check = |cidrs: &[&str]| network(&strings(cidrs), ("red", &ranges), &siblings);
        assert!(check(&["10.0.2.0/24", "10.0.3.0/24"]).is_ok());
        assert!(matches!(
            check(&["10.1.0.0/24"]),
            Err(RangeError::OutsideVpc { .. })
        ));
        assert!(matches!(
            check(&["10.0.1.128/25"]),
            Err(RangeError::Sibling { .. })
        ));
        assert!(matches!(
            check(&["10.0.2.0/24", "10.0.2.0/25"]),
            Err(RangeError::Itself { .. })
        ));
        assert!(matches!(check(&[]), Err(RangeError::Malformed(_))));
    }
}
