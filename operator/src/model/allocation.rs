//! Proposes the address that an endpoint asks for. The claim decides.

use std::net::IpAddr;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use k8s_openapi::jiff::SignedDuration;
use kube::ResourceExt;
use sha2::{Digest, Sha256};
use thuban_api::cidr::Cidr;
use thuban_api::identifiers::Vni;
use thuban_api::{Endpoint, EndpointType, IpClaim, IpClaimSpec};

/// A family of addresses. An endpoint has one address of each that its network has ranges of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Family {
    V4,
    V6,
}

impl Family {
    pub const ALL: [Self; 2] = [Self::V4, Self::V6];

    pub fn name(self) -> &'static str {
        match self {
            Self::V4 => "IPv4",
            Self::V6 => "IPv6",
        }
    }

    pub fn of(address: IpAddr) -> Self {
        if address.is_ipv4() { Self::V4 } else { Self::V6 }
    }

    /// Returns the ranges of this family, in their order.
    pub fn ranges(self, ranges: &[Cidr]) -> Vec<Cidr> {
        let own = ranges.iter().filter(|range| Self::of(range.base()) == self);
        own.copied().collect()
    }
}

/// Returns the lowest address of the ranges that is not taken, and its range. `from` skips the addresses below it, in
/// its own range.
pub fn propose(
    ranges: &[Cidr],
    from: Option<IpAddr>,
    is_taken: impl FnMut(IpAddr) -> bool,
) -> Option<(IpAddr, Cidr)> {
    free(ranges, from, is_taken).next()
}

/// Yields the addresses of the ranges that are not taken, each with its range: the lowest of each range first. `from`
/// skips the addresses below it, in its own range.
pub fn free(
    ranges: &[Cidr],
    from: Option<IpAddr>,
    mut is_taken: impl FnMut(IpAddr) -> bool,
) -> impl Iterator<Item = (IpAddr, Cidr)> {
    let own = move |range: Cidr| from.is_some_and(|from| range.contains_address(from));
    let skipped = ranges.iter().position(|range| own(*range)).unwrap_or_default();
    let hosts = ranges.iter().skip(skipped).flat_map(move |range| {
        let first = from.filter(|_| own(*range)).unwrap_or(range.base());
        range.hosts_from(first).map(move |address| (address, *range))
    });
    hosts.filter(move |(address, _)| !is_taken(*address))
}

/// Returns for how many endpoints a network has IPv4 addresses: every endpoint has one, and IPv6 ranges are larger.
pub fn capacity(ranges: &[Cidr]) -> u64 {
    let ranges = Family::V4.ranges(ranges);
    ranges.iter().map(|range| range.capacity()).sum()
}

/// Returns the name of the claim of an address: IPv6 as 32 hex digits, because names of objects have no colons.
pub fn ip_claim_name(vpc: &str, address: IpAddr) -> String {
    match address {
        IpAddr::V4(address) => format!("{vpc}.{address}"),
        IpAddr::V6(address) => format!("{vpc}.{:032x}", u128::from(address)),
    }
}

/// Returns the addresses that an Endpoint has, IPv4 first: those of its status, else those claimed before it was made.
pub fn addresses_of(endpoint: &Endpoint) -> Vec<IpAddr> {
    let status = endpoint.status.as_ref().map(|status| &status.addresses);
    let texts = status.filter(|addresses| !addresses.is_empty());
    let texts = texts.unwrap_or(&endpoint.spec.claimed);
    texts.iter().filter_map(|text| text.parse().ok()).collect()
}

pub fn family_of(claim: &IpClaimSpec) -> Option<Family> {
    claim.address.parse().ok().map(Family::of)
}

/// The owner of a claim.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    pub namespace: String,
    /// Name of the Endpoint.
    pub endpoint: String,
    /// Name of the pod; empty if a user made the Endpoint.
    pub pod: String,
    /// UID of the pod, or of the Endpoint if a user made it.
    pub uid: String,
}

impl Owner {
    /// Whether the claim was made for this owner.
    pub fn has(&self, claim: &IpClaimSpec) -> bool {
        claim.endpoint_namespace == self.namespace
            && claim.endpoint_name == self.endpoint
            && claim.owner_uid == self.uid
    }

    /// Whether the claim was made for this owner and is not released.
    pub fn holds(&self, claim: &IpClaim) -> bool {
        self.has(&claim.spec) && !is_released(claim)
    }

    /// Whether the claim was made for the same pod or Endpoint by name, maybe in an earlier life.
    pub fn had(&self, claim: &IpClaimSpec) -> bool {
        let is_same = if self.pod.is_empty() {
            claim.endpoint_name == self.endpoint
        } else {
            claim.pod == self.pod
        };
        claim.endpoint_namespace == self.namespace && claim.pod.is_empty() == self.pod.is_empty() && is_same
    }

    pub fn of(endpoint: &Endpoint) -> Self {
        let pod = endpoint.spec.pod_ref.clone();
        let own = endpoint.uid().unwrap_or_default();
        let (pod, uid) = pod.map_or((String::new(), own), |pod| (pod.name, pod.uid));
        Self {
            namespace: endpoint.namespace().unwrap_or_default(),
            endpoint: endpoint.name_any(),
            pod,
            uid,
        }
    }
}

pub fn is_released(claim: &IpClaim) -> bool {
    let status = claim.status.as_ref();
    status.is_some_and(|status| status.released_at.is_some())
}

/// How long after its claim an Endpoint may be made without a word in the claim. Operators release a claim without an
/// Endpoint after 20 s at the earliest.
pub const FRESH: SignedDuration = SignedDuration::from_secs(10);

/// Whether no release of the claim that was decided before the Endpoint was there can still be written: the Endpoint
/// was made soon after the claim, or the claim was written since then.
pub fn is_confirmed(claim: &IpClaim, endpoint: &Endpoint) -> bool {
    let status = claim.status.as_ref();
    let confirmed_for = status.and_then(|status| status.confirmed_for.as_deref());
    if confirmed_for.is_some() && confirmed_for == endpoint.metadata.uid.as_deref() {
        return true;
    }
    let made = |meta: &ObjectMeta| meta.creation_timestamp.as_ref().map(|time| time.0);
    let times = made(&claim.metadata).zip(made(&endpoint.metadata));
    times.is_some_and(|(claim, endpoint)| endpoint.duration_since(claim) < FRESH)
}

/// Whether another Endpoint of the owner has confirmed the claim.
pub fn is_anothers(claim: &IpClaim, endpoint: &Endpoint) -> bool {
    let status = claim.status.as_ref();
    let confirmed_for = status.and_then(|status| status.confirmed_for.as_deref());
    confirmed_for.is_some() && confirmed_for != endpoint.metadata.uid.as_deref()
}

/// Returns the address of this family that the owner has already claimed, and its range.
pub fn own_claim<'a>(
    claims: impl IntoIterator<Item = &'a IpClaim>,
    owner: &Owner,
    family: Family,
    ranges: &[Cidr],
) -> Option<(IpAddr, Cidr)> {
    claims
        .into_iter()
        .filter(|claim| owner.holds(claim))
        .filter_map(|claim| claim.spec.address.parse::<IpAddr>().ok())
        .filter(|address| Family::of(*address) == family)
        .find_map(|address| {
            let range = ranges.iter().find(|range| range.contains_address(address))?;
            Some((address, *range))
        })
}

/// The standing of a claim with the Endpoint that it names.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The Endpoint has its address.
    Counted,
    /// The Endpoint has no address yet and may still take this one.
    Open,
    /// The Endpoint is gone, or has its addresses, and the claimed one is not among them.
    Void,
}

pub fn standing(claim: &IpClaimSpec, endpoint: Option<&Endpoint>) -> Standing {
    let own = endpoint.filter(|endpoint| Owner::of(endpoint).has(claim));
    let Some(endpoint) = own else {
        return Standing::Void;
    };
    // A pod's addresses are taken together: if it has one, no other is added. Addresses that a Service asks for come
    // after the cluster's.
    let addresses = addresses_of(endpoint);
    let address = claim.address.parse();
    let is_scaled = endpoint.spec.kind == EndpointType::Scaled;
    if address.is_ok_and(|address| addresses.contains(&address)) {
        Standing::Counted
    } else if addresses.is_empty() || is_scaled && endpoint.spec.addresses.contains(&claim.address) {
        Standing::Open
    } else {
        Standing::Void
    }
}

/// Returns a free VNI: the one that the VPC's UID leads to, or the next one. UIDs are random. So hardly any VPC gets a
/// number of which a droplet still has rows, although a restore of etcd took the VPC of these rows and its claim away.
pub fn propose_vni(vpc_uid: &str, is_taken: impl Fn(u32) -> bool) -> Option<u32> {
    let hash = Sha256::digest(vpc_uid);
    let first = u32::from_be_bytes([0, hash[0], hash[1], hash[2]]).max(Vni::MIN.get());
    (first..=Vni::MAX)
        .chain(Vni::MIN.get()..first)
        .find(|vni| !is_taken(*vni))
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
    use k8s_openapi::jiff::Timestamp;
    use thuban_api::identifiers::Vni;
    use thuban_api::{Endpoint, EndpointSpec, EndpointStatus, IpClaim, IpClaimSpec, IpClaimStatus, PodRef};

    use super::{
        Family, Owner, Standing, capacity, ip_claim_name, is_anothers, is_confirmed, own_claim, propose,
        propose_vni, standing,
    };

    fn endpoint(uid: &str, addresses: &[&str]) -> Endpoint {
        let pod_ref = PodRef {
            name: "web".into(),
            uid: uid.into(),
            cni_uid: "u".into(),
        };
        let spec = EndpointSpec {
            kind: thuban_api::EndpointType::Simple,
            vpc: "red".into(),
            network: "web".into(),
            pod_ref: Some(pod_ref),
            service_ref: None,
            addresses: Vec::new(),
            claimed: Vec::new(),
            mac: None,
            droplet: "d".into(),
        };
        let mut endpoint = Endpoint::new("web-u", spec);
        endpoint.metadata.uid = Some(uid.into());
        endpoint.metadata.namespace = Some("ns".into());
        endpoint.status = Some(EndpointStatus {
            addresses: addresses.iter().map(|text| (*text).to_owned()).collect(),
            ..EndpointStatus::default()
        });
        endpoint
    }

    fn claim(uid: &str, address: &str) -> IpClaim {
        let spec = IpClaimSpec {
            vpc: "red".into(),
            network: "web".into(),
            address: address.into(),
            endpoint_namespace: "ns".into(),
            endpoint_name: "web-u".into(),
            pod: "web".into(),
            owner_uid: uid.into(),
            droplet: "d".into(),
        };
        IpClaim::new("name", spec)
    }

    #[test]
    fn earlier_claim_is_found_by_family_unless_released() {
        let ranges = ["10.0.1.0/24", "fd00:1::/64"].map(|text| text.parse().unwrap());
        let mut claims = vec![
            claim("other", "10.0.1.2"),
            claim("e1", "fd00:1::7"),
            claim("e1", "10.0.1.3"),
        ];
        let owner = Owner::of(&endpoint("e1", &[]));
        let find = |claims: &[IpClaim], family| {
            let own = own_claim(claims, &owner, family, &ranges);
            own.map(|(address, _)| address.to_string())
        };
        assert_eq!(find(&claims, Family::V4).as_deref(), Some("10.0.1.3"));
        assert_eq!(find(&claims, Family::V6).as_deref(), Some("fd00:1::7"));
        claims[1].status = Some(IpClaimStatus {
            released_at: Some("then".into()),
            ..IpClaimStatus::default()
        });
        assert_eq!(find(&claims, Family::V6), None);
        claims[2].spec.address = "10.9.9.9".into();
        assert_eq!(find(&claims, Family::V4), None, "of no range of the network");
    }

    #[test]
    fn claim_older_than_its_endpoint_counts_once_it_names_it() {
        let made = |second: i64| Some(Time(Timestamp::from_second(second).unwrap()));
        let (mut claim, mut endpoint) = (claim("e1", "10.0.1.2"), endpoint("e1", &[]));
        claim.metadata.creation_timestamp = made(1000);
        for (second, is_fresh) in [
            (990, true),
            (1000, true),
            (1009, true),
            (1010, false),
            (2000, false),
        ] {
            endpoint.metadata.creation_timestamp = made(second);
            assert_eq!(is_confirmed(&claim, &endpoint), is_fresh, "{second}");
        }
        for (uid, is_its) in [("e2", false), ("e1", true)] {
            claim.status = Some(IpClaimStatus {
                confirmed_for: Some(uid.into()),
                ..IpClaimStatus::default()
            });
            assert_eq!(is_confirmed(&claim, &endpoint), is_its, "{uid}");
        }
    }

    #[test]
    fn a_claim_is_anothers_once_another_confirmed_it() {
        let (mut claim, endpoint) = (claim("e1", "10.0.1.2"), endpoint("e1", &["10.0.1.2"]));
        assert!(!is_anothers(&claim, &endpoint));
        for (uid, is_its) in [("e2", true), ("e1", false)] {
            claim.status = Some(IpClaimStatus {
                confirmed_for: Some(uid.into()),
                ..IpClaimStatus::default()
            });
            assert_eq!(is_anothers(&claim, &endpoint), is_its, "{uid}");
        }
    }

    #[test]
    fn both_claims_of_an_endpoint_count_and_one_that_lost_does_not() {
        let both = endpoint("e1", &["10.0.1.2", "fd00:1::2"]);
        let (empty, stranger) = (endpoint("e1", &[]), endpoint("e2", &[]));
        let of = |address: &str, endpoint| standing(&claim("e1", address).spec, endpoint);
        for address in ["10.0.1.2", "fd00:1::2", "fd00:1:0::2"] {
            assert_eq!(of(address, Some(&both)), Standing::Counted, "{address}");
        }
        for address in ["10.0.1.3", "fd00:1::3"] {
            assert_eq!(of(address, Some(&both)), Standing::Void, "{address}");
            assert_eq!(of(address, Some(&empty)), Standing::Open, "{address}");
            assert_eq!(of(address, Some(&stranger)), Standing::Void, "{address}");
            assert_eq!(of(address, None), Standing::Void, "{address}");
        }
    }

    #[test]
    fn a_vpcs_uid_leads_to_its_number_and_on_to_the_next_free_one() {
        let free = |_: u32| false;
        let uids = (0..1000).map(|number| format!("uid-{number}"));
        let numbers: Vec<u32> = uids.filter_map(|uid| propose_vni(&uid, free)).collect();
        assert_eq!(numbers.len(), 1000);
        let below_half = numbers.iter().filter(|number| **number < Vni::MAX / 2).count();
        assert!((400..600).contains(&below_half), "{below_half} of 1000");
        let first = numbers[0];
        assert_eq!(
            propose_vni("uid-0", free),
            Some(first),
            "it is the same each time"
        );
        assert_eq!(propose_vni("uid-0", |vni| vni == first), Some(first + 1));
        let last_free = |free: u32| propose_vni("uid-0", move |vni| vni != free);
        for number in [1, first - 1, Vni::MAX] {
            assert_eq!(last_free(number), Some(number));
        }
        assert_eq!(propose_vni("uid-0", |_| true), None);
    }

    #[test]
    fn lowest_free_address_is_proposed_and_full_range_skipped() {
        let ranges = ["10.0.1.0/30".parse().unwrap(), "10.0.9.0/29".parse().unwrap()];
        let mut taken = Vec::new();
        while let Some((address, range)) = propose(&ranges, None, |address| taken.contains(&address)) {
            assert!(range.contains_address(address));
            taken.push(address);
        }
        let last: Vec<_> = taken.iter().map(ToString::to_string).collect();
        let all = [
            "10.0.1.2", "10.0.9.2", "10.0.9.3", "10.0.9.4", "10.0.9.5", "10.0.9.6",
        ];
        assert_eq!(last, all);
        assert_eq!(capacity(&ranges), 6);
        let from = |text: &str| {
            let from = propose(&ranges, text.parse().ok(), |_| false);
            from.map(|(address, _)| address.to_string())
        };
        assert_eq!(from("10.0.9.4").as_deref(), Some("10.0.9.4"));
        assert_eq!(
            from("10.0.1.3").as_deref(),
            Some("10.0.9.2"),
            "the last of its range"
        );
        assert_eq!(from("10.7.7.7").as_deref(), Some("10.0.1.2"), "of no range");
    }

    #[test]
    fn an_owner_has_its_claims_and_had_those_of_its_namesake() {
        let now = Owner::of(&endpoint("e2", &[]));
        let before = claim("e1", "10.0.1.2").spec;
        assert!(!now.has(&before) && now.had(&before));
        assert!(Owner::of(&endpoint("e1", &[])).has(&before));
        let other = Owner {
            namespace: "other".into(),
            ..now.clone()
        };
        let user = Owner {
            pod: String::new(),
            ..now
        };
        assert!(!other.had(&before) && !user.had(&before));
    }

    #[test]
    fn each_family_has_its_own_ranges_and_ipv6_is_not_counted() {
        let ranges = ["10.0.1.0/30", "fd00:1::/64", "10.0.9.0/29"].map(|text| text.parse().unwrap());
        assert_eq!(Family::V4.ranges(&ranges), [ranges[0], ranges[2]]);
        assert_eq!(Family::V6.ranges(&ranges), [ranges[1]]);
        assert_eq!(capacity(&ranges), 6);
        let first: IpAddr = "fd00:1::2".parse().unwrap();
        let pick = |taken: &[IpAddr]| {
            propose(&Family::V6.ranges(&ranges), None, |address| {
                taken.contains(&address)
            })
        };
        assert_eq!(pick(&[]), Some((first, ranges[1])));
        assert_eq!(pick(&[first]), Some(("fd00:1::3".parse().unwrap(), ranges[1])));
    }

    #[test]
    fn claims_are_named_by_vpc_and_address_without_colons() {
        assert_eq!(ip_claim_name("red", [10, 0, 1, 2].into()), "red.10.0.1.2");
        let address: IpAddr = "fd00:1::a".parse().unwrap();
        assert_eq!(
            ip_claim_name("red", address),
            "red.fd00000100000000000000000000000a"
        );
    }
}
