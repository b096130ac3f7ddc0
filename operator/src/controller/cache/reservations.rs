//! Reserves addresses that a reconciler is about to claim.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Mutex;

use thuban_api::cidr::Cidr;

use crate::model::allocation::Family;

/// Addresses that a reconciler is about to claim, by UID of the endpoint and family, so that no two reconcilers pick
/// the same. This only avoids conflicts: the claim decides.
#[derive(Debug, Default)]
pub struct Reservations(Mutex<HashMap<(String, Family), Reservation>>);

#[derive(Debug)]
struct Reservation {
    vpc: String,
    droplet: String,
    address: IpAddr,
}

impl Reservations {
    /// Runs `pick` with the addresses that others reserved in the VPC or on the droplet, and keeps its result.
    pub fn reserve(
        &self,
        uid: &str,
        vpc: &str,
        droplet: &str,
        pick: impl FnOnce(&dyn Fn(IpAddr) -> bool) -> Option<(IpAddr, Cidr)>,
    ) -> Option<(IpAddr, Cidr)> {
        let mut reserved = self.0.lock().ok()?;
        let others: Vec<_> = reserved
            .iter()
            .filter(|((other, _), held)| other != uid && (held.vpc == vpc || held.droplet == droplet))
            .map(|(_, held)| held.address)
            .collect();
        let (address, range) = pick(&|address| others.contains(&address))?;
        reserved.insert(
            (uid.to_owned(), Family::of(address)),
            Reservation {
                vpc: vpc.to_owned(),
                droplet: droplet.to_owned(),
                address,
            },
        );
        Some((address, range))
    }

    pub fn forget(&self, uid: &str) {
        if let Ok(mut reserved) = self.0.lock() {
            for family in Family::ALL {
                reserved.remove(&(uid.to_owned(), family));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use thuban_api::cidr::Cidr;

    use super::Reservations;
    use crate::model::allocation::propose;

    #[test]
    fn endpoint_reserves_address_per_family_until_forgotten() {
        let reservations = Reservations::default();
        let reserve = |uid: &str, vpc: &str, droplet: &str, range: &str| -> IpAddr {
            let range: [Cidr; 1] = [range.parse().unwrap()];
            let pick = reservations.reserve(uid, vpc, droplet, |is_reserved| {
                propose(&range, None, is_reserved)
            });
            pick.unwrap().0
        };
        let both = |uid: &str, vpc: &str, droplet: &str| {
            ["10.0.1.0/24", "fd00:1::/64"].map(|range| reserve(uid, vpc, droplet, range).to_string())
        };
        assert_eq!(both("a", "red", "d1"), ["10.0.1.2", "fd00:1::2"]);
        assert_eq!(both("a", "red", "d1"), ["10.0.1.2", "fd00:1::2"], "its own");
        assert_eq!(both("b", "red", "d2"), ["10.0.1.3", "fd00:1::3"], "same VPC");
        assert_eq!(both("c", "blue", "d1"), ["10.0.1.3", "fd00:1::3"], "same droplet");
        assert_eq!(both("d", "blue", "d3"), ["10.0.1.2", "fd00:1::2"]);
        reservations.forget("a");
        assert_eq!(both("e", "red", "d1"), ["10.0.1.2", "fd00:1::2"]);
    }
}
