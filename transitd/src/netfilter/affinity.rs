//! Session affinity: for each place to which connections to a service's port are led, a set of the clients that have
//! their connections there.
//!
//! The kernel adds a client with its first connection, and removes it some time after its last one. By whatever way a
//! client comes to a port, its place is the same, if that way leads there.
//!
//! Invariant: sets of clients stay as they are when the table is written again, as long as their places are there.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fmt::Write as _;
use std::net::{IpAddr, SocketAddr};

use serde_json::Value;
use thuban_api::identifiers::Vni;
use thuban_common::{host_stack::NFT_TABLE, packet::ipv4::UDP};

use super::served::chain_text;

/// The most clients of a VPC's Services that a node remembers, in the sets of all places together. Further clients get
/// any place.
const MAX_CLIENTS: usize = 65_536;
/// The most places of a VPC's Services. Ports that have no room for theirs have no affinity.
const MAX_PLACES: usize = 1024;
const PREFIX: &str = "affinity-";

/// The affinity of a chain.
pub(super) struct Affinity {
    vni: Vni,
    seconds: u32,
    /// The port of the service, in names of sets.
    port: String,
}

/// A place to which a chain leads.
pub(super) struct Place {
    /// Its name, in the name of its set.
    pub name: String,
    /// The rules that lead there.
    pub rules: Vec<String>,
}

/// The sets of clients of each VPC, and whether the clients have IPv6 addresses.
#[derive(Default)]
pub(super) struct Sets(BTreeMap<Vni, BTreeMap<String, bool>>);

impl Sets {
    /// Adds those of a chain. Returns whether there is room for them.
    pub fn add(&mut self, affinity: &Affinity, places: &[Place], is_v6: bool) -> bool {
        let own = self.0.entry(affinity.vni).or_default();
        let names: BTreeSet<_> = places.iter().map(|place| affinity.set(place)).collect();
        let new = names.iter().filter(|name| !own.contains_key(*name)).count();
        let fits = own.len() + new <= MAX_PLACES;
        if fits {
            own.extend(names.into_iter().map(|name| (name, is_v6)));
        }
        fits
    }

    /// Yields the text of each set. The sets of a VPC have equal room.
    pub fn texts(&self) -> impl Iterator<Item = String> {
        self.0.values().flat_map(|own| {
            let room = MAX_CLIENTS / own.len().max(1);
            own.iter().map(move |(name, is_v6)| {
                let family = if *is_v6 { "ipv6_addr" } else { "ipv4_addr" };
                format!(
                    "  set {name} {{\n    type {family}; size {room}; flags dynamic,timeout; gc-interval 1m\n  }}"
                )
            })
        })
    }
}

/// Returns an address as it may stand in a name.
pub(super) fn named(address: IpAddr) -> String {
    address.to_string().replace(':', "_")
}

impl Affinity {
    /// Returns none without affinity. `vni`: whose clients these are.
    pub fn new(vni: Vni, (service, protocol, port): (IpAddr, u8, u16), seconds: u32) -> Option<Self> {
        (seconds > 0).then(|| Self {
            vni,
            seconds,
            port: format!("{protocol}-{}-{port}", named(service)),
        })
    }

    fn set(&self, place: &Place) -> String {
        format!("{PREFIX}{}-{}", self.port, place.name)
    }

    /// Returns the rules by which a chain finds the place of a client: the one it has, or any.
    pub fn choice(&self, chain: usize, places: &[Place], is_v6: bool) -> Vec<String> {
        let client = client(is_v6);
        let known = places.iter().enumerate().map(|(index, place)| {
            let set = self.set(place);
            format!("{client} @{set} goto port-{chain}-{index}")
        });
        let shares = (0..places.len()).map(|index| format!("{index} : goto port-{chain}-{index}"));
        let shares = shares.collect::<Vec<_>>().join(", ");
        let any = format!("numgen random mod {} vmap {{ {shares} }}", places.len());
        known.chain([any]).collect()
    }

    /// Returns the chains of places, to which these rules lead.
    pub fn chains(&self, chain: usize, places: &[Place], is_v6: bool) -> String {
        let client = client(is_v6);
        let each = places.iter().enumerate().map(|(index, place)| {
            // If the set is full the client is led to the place all the same.
            let keep = format!(
                "update @{} {{ {client} timeout {}s }}",
                self.set(place),
                self.seconds
            );
            let rules: Vec<_> = [keep].into_iter().chain(place.rules.iter().cloned()).collect();
            chain_text(&format!("port-{chain}-{index}"), &rules)
        });
        each.collect()
    }
}

fn client(is_v6: bool) -> &'static str {
    if is_v6 { "ip6 saddr" } else { "ip saddr" }
}

/// Returns the commands that remove all that the table has.
pub(super) fn removal() -> String {
    format!("table inet {NFT_TABLE} {{\n}}\ndelete table inet {NFT_TABLE}\n")
}

/// Whether a text has sets of clients.
pub(super) fn has_clients(text: &str) -> bool {
    text.contains(&format!("set {PREFIX}"))
}

/// What the table has, compared with its new text.
pub(super) struct Old<'a> {
    /// Sets of clients that the new text has too.
    stay: Vec<&'a str>,
    /// All else: kinds and names.
    go: Vec<(&'a str, &'a str)>,
}

impl<'a> Old<'a> {
    /// `there`: what the kernel has of the family, each with its kind.
    pub fn new(there: &'a [(String, Value)], text: &str) -> Self {
        let sets: HashSet<&str> = text
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix("set ")?.strip_suffix(" {"))
            .collect();
        let mut old = Self {
            stay: Vec::new(),
            go: Vec::new(),
        };
        for (kind, object) in there.iter().filter(|(_, object)| object["table"] == NFT_TABLE) {
            let Some(name) = object["name"].as_str() else {
                continue;
            };
            if kind == "set" && name.starts_with(PREFIX) && sets.contains(name) {
                old.stay.push(name);
            } else {
                old.go.push((kind, name));
            }
        }
        old
    }

    /// Returns the commands that remove all but the sets that stay; none if no set stays.
    pub fn removal(&self) -> Option<String> {
        if self.stay.is_empty() {
            return None;
        }
        let mut commands = format!("flush table inet {NFT_TABLE}\n");
        // Elements of maps lead to chains.
        for kinds in [&["map", "set"][..], &["counter", "chain"]] {
            for (kind, name) in self.go.iter().filter(|(kind, _)| kinds.contains(kind)) {
                let _ = writeln!(commands, "delete {kind} inet {NFT_TABLE} {name}");
            }
        }
        Some(commands)
    }

    /// Returns the places of UDP that go. Their clients' flows would lead there for as long as they last.
    pub fn datagram_places(&self) -> Vec<SocketAddr> {
        let prefix = format!("{PREFIX}{UDP}-");
        let place = |name: &str| {
            let (rest, port) = name.strip_prefix(&prefix)?.rsplit_once('-')?;
            let (_, address) = rest.rsplit_once('-')?;
            let address: IpAddr = address.replace('_', ":").parse().ok()?;
            Some(SocketAddr::new(address, port.parse().ok()?))
        };
        self.go.iter().filter_map(|(_, name)| place(name)).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use serde_json::json;

    use super::*;

    const SERVICE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 7));

    fn affinity(vni: u32, port: u16) -> Affinity {
        Affinity::new(Vni::new(vni).unwrap(), (SERVICE, 6, port), 60).unwrap()
    }

    fn places(count: usize) -> Vec<Place> {
        let place = |name: usize| Place {
            name: name.to_string(),
            rules: vec!["accept".to_owned()],
        };
        (0..count).map(place).collect()
    }

    /// Returns the rooms of sets, by their text.
    fn rooms(sets: &Sets) -> Vec<usize> {
        let texts = sets.texts();
        let room = |text: String| {
            let (_, size) = text.split_once("size ").unwrap();
            size.split_once(';').unwrap().0.parse().unwrap()
        };
        texts.map(room).collect()
    }

    #[test]
    fn clients_that_a_vpc_keeps_have_a_bound() {
        for (ports, count) in [(1, 1), (1, 3), (128, 8), (1, 1024), (3, 341)] {
            let mut sets = Sets::default();
            for port in 0..ports {
                assert!(sets.add(&affinity(7, port), &places(count), false));
                assert!(
                    sets.add(&affinity(7, port), &places(count), false),
                    "the same sets"
                );
            }
            assert!(
                sets.add(&affinity(8, 1), &places(MAX_PLACES), true),
                "another VPC"
            );
            let rooms = rooms(&sets);
            let (own, others) = rooms.split_at(usize::from(ports) * count);
            for rooms in [own, others] {
                assert!(rooms.iter().sum::<usize>() <= MAX_CLIENTS);
                assert!(rooms.iter().all(|room| *room >= MAX_CLIENTS / MAX_PLACES));
            }
        }
        assert!(Affinity::new(Vni::MIN, (SERVICE, 6, 80), 0).is_none());
    }

    #[test]
    fn a_port_without_room_for_its_places_has_none() {
        let mut sets = Sets::default();
        assert!(sets.add(&affinity(7, 80), &places(MAX_PLACES - 1), false));
        assert!(!sets.add(&affinity(7, 81), &places(2), false));
        assert!(sets.add(&affinity(7, 82), &places(1), false));
        assert_eq!(rooms(&sets).len(), MAX_PLACES);
    }

    fn object(kind: &str, name: &str, table: &str) -> (String, Value) {
        (kind.to_owned(), json!({"name": name, "table": table}))
    }

    #[test]
    fn all_but_clients_with_a_place_goes() {
        let there = [
            ("table".to_owned(), json!({"name": "thuban"})),
            object("counter", "lost", "thuban"),
            object("set", "affinity-6-10.96.0.7-80-1", "thuban"),
            object("set", "affinity-6-10.96.0.7-80-12", "thuban"),
            object("set", "affinity-6-10.96.0.7-80-1", "other"),
            object("map", "ports", "thuban"),
            object("chain", "port-0", "thuban"),
        ];
        let mut sets = Sets::default();
        sets.add(&affinity(7, 80), &places(12), false);
        let text: Vec<String> = sets.texts().collect();
        let text = text.join("\n");
        assert!(has_clients(&text));
        assert_eq!(
            Old::new(&there, &text).removal().unwrap(),
            "flush table inet thuban\n\
             delete set inet thuban affinity-6-10.96.0.7-80-12\n\
             delete map inet thuban ports\n\
             delete counter inet thuban lost\n\
             delete chain inet thuban port-0\n"
        );
        assert_eq!(Old::new(&there[3..], &text).removal(), None, "no client stays");
        let other = "set affinity-6-10.96.0.7-80-13 {";
        assert_eq!(Old::new(&there, other).removal(), None);
    }

    #[test]
    fn places_of_udp_that_go_are_told() {
        let there = [
            object("set", "affinity-17-10.96.0.7-80-10.0.0.5-8080", "thuban"),
            object("set", "affinity-17-10.96.0.7-80-10.0.0.6-8080", "thuban"),
            object("set", "affinity-17-fd00__7-80-fd00_1__5-53", "thuban"),
            object("set", "affinity-17-10.96.0.7-80-here", "thuban"),
            object("set", "affinity-6-10.96.0.7-80-10.0.0.7-8080", "thuban"),
            object("set", "affinity-17-10.96.0.7-80-10.0.0.8-8080", "other"),
        ];
        let old = Old::new(&there, "  set affinity-17-10.96.0.7-80-10.0.0.6-8080 {");
        let expected = ["10.0.0.5:8080", "[fd00:1::5]:53"].map(|place| place.parse().unwrap());
        assert_eq!(old.datagram_places(), expected);
    }
}
