//! Ranges that neither VPCs nor IpPools may touch.

use crate::cidr::{Cidr, CidrError};

/// Ranges that no VPC may have in any installation. Of IPv6 they leave global unicast (2000::/3) and unique local
/// addresses (fc00::/7).
const NEVER: [(&str, &str); 18] = [
    ("127.0.0.0/8", "loopback"),
    ("169.254.0.0/16", "link-local"),
    ("224.0.0.0/4", "multicast"),
    ("240.0.0.0/4", "reserved"),
    ("0.0.0.0/8", "this network"),
    ("::/3", "unspecified, loopback, IPv4-mapped and reserved"),
    ("2001::/23", "protocol assignments such as Teredo"),
    ("2002::/16", "6to4"),
    ("4000::/2", "reserved"),
    ("8000::/2", "reserved"),
    ("c000::/3", "reserved"),
    ("e000::/4", "reserved"),
    ("f000::/5", "reserved"),
    ("f800::/6", "reserved"),
    ("fe00::/9", "reserved"),
    ("fe80::/10", "link-local"),
    ("fec0::/10", "site-local, deprecated"),
    ("ff00::/8", "multicast"),
];

/// What the underlay's ranges are.
const UNDERLAY: &str = "addresses of nodes and underlay";

/// Ranges that nobody may use.
#[derive(Clone, Debug, Default)]
pub struct RefusedRanges {
    /// Ranges, and what they are.
    ranges: Vec<(Cidr, String)>,
    underlay: Vec<Cidr>,
}

impl RefusedRanges {
    /// Returns these ranges and one more; `what` says why it is refused.
    #[must_use]
    pub fn and(&self, range: Cidr, what: &str) -> Self {
        let mut more = self.clone();
        more.ranges.push((range, what.to_owned()));
        more
    }

    /// Makes the set of the fixed ranges, the services' and the underlay's.
    pub fn new(services: &[Cidr], underlay: &[Cidr]) -> Result<Self, CidrError> {
        let mut ranges = Vec::new();
        for (range, what) in NEVER {
            ranges.push((range.parse()?, what.to_owned()));
        }
        ranges.extend(
            services
                .iter()
                .map(|range| (*range, "service addresses of the cluster".to_owned())),
        );
        let underlay = underlay.to_vec();
        Ok(Self { ranges, underlay })
    }

    /// Returns a refused range that a range touches, and what it is.
    pub fn find(&self, range: Cidr) -> Option<(Cidr, &str)> {
        let touched = || self.underlay.iter().find(|refused| refused.overlaps(range));
        self.find_on_link(range)
            .or_else(|| touched().map(|refused| (*refused, UNDERLAY)))
    }

    /// Returns the same for addresses that are to be on the link of the nodes: the underlay may have these.
    pub fn find_on_link(&self, range: Cidr) -> Option<(Cidr, &str)> {
        let found = self.ranges.iter().find(|(refused, _)| refused.overlaps(range));
        found.map(|(refused, what)| (*refused, what.as_str()))
    }
}
