//! Checks rules of ranges across objects; every error names the field and what was expected.

use std::net::IpAddr;

use thiserror::Error;
use thuban_api::cidr::{Cidr, CidrError};
use thuban_api::refused_ranges::RefusedRanges;

use super::range_claims::CLAIMED;

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum RangeError {
    #[error("spec.cidrs: {0}")]
    Malformed(String),
    #[error("spec.cidrs: {cidr} touches {refused} ({what}); choose a range outside of it")]
    Refused { cidr: Cidr, refused: Cidr, what: String },
    #[error("spec.cidrs: {cidr} contains the address {address} of node {node}; choose a range without it")]
    NodeAddress {
        cidr: Cidr,
        address: IpAddr,
        node: String,
    },
    #[error("spec.cidrs: {cidr} overlaps {other} of the same object")]
    Itself { cidr: Cidr, other: Cidr },
    #[error(
        "spec.cidrs: {cidr} lies in none of the ranges of VPC {vpc:?}: {ranges}; choose one within them or append one \
         to the VPC's spec.cidrs first"
    )]
    OutsideVpc { cidr: Cidr, vpc: String, ranges: String },
    #[error(
        "spec.cidrs: {cidr} overlaps {other} of network {network:?} in the same VPC; choose a free range"
    )]
    Sibling {
        cidr: Cidr,
        other: Cidr,
        network: String,
    },
    #[error("spec.cidrs: begins with {0}; the first range of a network must be IPv4, such as 10.0.1.0/24")]
    NotIpv4First(Cidr),
    #[error("spec.cidrs: {0} is an IPv6 range of a network, expected /64 to /120, such as fd00:0:0:1::/64")]
    PrefixLength(Cidr),
    #[error("spec.vpc: VPC {0:?} does not exist; create it or name another")]
    NoVpc(String),
    #[error("spec.vpc: VPC {0:?} was not accepted; see its conditions")]
    VpcNotAccepted(String),
    #[error("spec.vpc: VPC {0:?} is being deleted; name another, or make it anew once it is gone")]
    VpcLeaves(String),
    #[error("ranges are claimed; they come into force when nothing else claims a part of them")]
    Claimed,
    #[error("spec.cidrs: {cidr} overlaps {other}, which {rival:?} claims too; waits until that is refused")]
    Contested { cidr: Cidr, other: Cidr, rival: String },
}

impl RangeError {
    /// Returns the CamelCase reason of the condition and the event.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Malformed(_) | Self::NotIpv4First(_) | Self::PrefixLength(_) => "InvalidCidr",
            Self::Refused { .. } | Self::NodeAddress { .. } => "RangeRefused",
            Self::Itself { .. } | Self::Sibling { .. } => "RangeOverlaps",
            Self::OutsideVpc { .. } => "OutsideVpc",
            Self::NoVpc(_) => "VpcNotFound",
            Self::VpcNotAccepted(_) => "VpcNotAccepted",
            Self::VpcLeaves(_) => "VpcLeaves",
            Self::Claimed | Self::Contested { .. } => CLAIMED,
        }
    }

    /// Whether nobody need do anything: the ranges are claimed, and the operator decides soon.
    pub fn is_passing(&self) -> bool {
        self.reason() == CLAIMED
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

/// Checks a VPC's ranges against refused ranges and the nodes' addresses.
pub fn vpc(
    cidrs: &[String],
    refused: &RefusedRanges,
    nodes: &[(String, IpAddr)],
) -> Result<Vec<Cidr>, RangeError> {
    let ranges = parse(cidrs)?;
    for cidr in &ranges {
        if let Some((range, what)) = refused.find(*cidr) {
            return Err(RangeError::Refused {
                cidr: *cidr,
                refused: range,
                what: what.to_owned(),
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

/// Prefix lengths of a network's IPv6 ranges: as long as hosts expect, and short enough to have a useful number of
/// addresses.
const NETWORK_PREFIXES: std::ops::RangeInclusive<u8> = 64..=120;

/// Checks a network's ranges against its VPC's and those of its siblings: (name, ranges).
pub fn network(
    cidrs: &[String],
    vpc: (&str, &[String]),
    siblings: &[(String, Vec<String>)],
) -> Result<Vec<Cidr>, RangeError> {
    let ranges = parse(cidrs)?;
    let vpc_ranges = parse(vpc.1).map_err(|_| RangeError::VpcNotAccepted(vpc.0.to_owned()))?;
    if let Some(first) = ranges.first().filter(|first| !first.is_ipv4()) {
        return Err(RangeError::NotIpv4First(*first));
    }
    for cidr in &ranges {
        if !cidr.is_ipv4() && !NETWORK_PREFIXES.contains(&cidr.prefix_length()) {
            return Err(RangeError::PrefixLength(*cidr));
        }
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
            &["10.96.0.0/16".parse().unwrap(), "fd00:96::/112".parse().unwrap()],
            &["172.31.77.0/24".parse().unwrap(), "fd00:77::/64".parse().unwrap()],
        )
        .unwrap()
    }

    #[test]
    fn refused_ranges_are_named() {
        let nodes = [
            ("n1".to_owned(), [192, 168, 1, 5].into()),
            ("n2".to_owned(), "2001:db8:5::5".parse().unwrap()),
        ];
        let check = |cidr: &str| {
            vpc(&strings(&[cidr]), &refused(), &nodes)
                .map(|_| ())
                .map_err(|e| e.to_string())
        };
        for cidr in [
            "10.0.0.0/16",
            "fd00:1::/48",
            "fc00::/8",
            "2a01:4f8::/32",
            "2001:db8::/48",
        ] {
            assert_eq!(check(cidr), Ok(()));
        }
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
            ("fd00:96::/48", "fd00:96::/112"),
            ("fd00:77:0:0:8000::/65", "fd00:77::/64"),
            ("2001:db8:5::/64", "n2"),
            ("::1/128", "loopback"),
            ("::/128", "unspecified"),
            ("::ffff:10.0.0.0/112", "IPv4-mapped"),
            ("64:ff9b::/96", "reserved"),
            ("2001::/32", "Teredo"),
            ("2002:a00::/24", "6to4"),
            ("2000::/3", "2001::/23"),
            ("5000::/16", "reserved"),
            ("9000::/16", "reserved"),
            ("d000::/16", "reserved"),
            ("e000::/16", "reserved"),
            ("f400::/16", "reserved"),
            ("fa00::/16", "reserved"),
            ("fe00::/16", "reserved"),
            ("fe80::/64", "link-local"),
            ("fec0::/64", "site-local"),
            ("ff02::/64", "multicast"),
            ("fd00::1/64", "fd00::/64"),
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

    #[test]
    fn network_ipv6_ranges_follow_ipv4_and_the_same_rules() {
        let ranges = strings(&["10.0.0.0/16", "fd00:1::/48"]);
        let siblings = [("web".to_owned(), strings(&["10.0.1.0/24", "fd00:1:0:1::/64"]))];
        let check = |cidrs: &[&str]| network(&strings(cidrs), ("red", &ranges), &siblings);
        for good in ["fd00:1:0:2::/64", "fd00:1:0:2::/120"] {
            assert!(check(&["10.0.2.0/24", good]).is_ok(), "{good}");
        }
        for (cidrs, words) in [
            (
                &["fd00:1:0:2::/64"][..],
                &["spec.cidrs", "fd00:1:0:2::/64", "IPv4"][..],
            ),
            (&["fd00:1:0:2::/64", "10.0.2.0/24"], &["first range", "IPv4"]),
            (&["10.0.2.0/24", "fd00:1:0:2::/63"], &["/63", "/64 to /120"]),
            (&["10.0.2.0/24", "fd00:1:0:2::/121"], &["/121", "/64 to /120"]),
            (
                &["10.0.2.0/24", "fd00:2::/64"],
                &["none of the ranges", "fd00:1::/48"],
            ),
            (&["10.0.2.0/24", "fd00:1:0:1::/80"], &["overlaps", "\"web\""]),
            (
                &["10.0.2.0/24", "fd00:1:0:2::/64", "fd00:1:0:2::/72"],
                &["same object"],
            ),
        ] {
            let error = check(cidrs).expect_err(&cidrs.join(" "));
            let text = error.to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{cidrs:?}: {text}");
        }
    }
}
