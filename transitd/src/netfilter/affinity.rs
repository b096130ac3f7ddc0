//! Session affinity: for each place to which connections to a service's port are led, a set of the clients that have
//! their connections there.
//!
//! The kernel adds a client with its first connection, and removes it some time after its last one. By whatever way a
//! client comes to a port, its place is the same, if that way leads there.
//!
//! Invariant: sets of clients stay as they are when the table is written again, as long as their places are there.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::net::IpAddr;

use serde_json::Value;
use thuban_common::host_stack::NFT_TABLE;

use super::served::chain_text;

/// The most clients of a service that a node remembers, in the sets of all its places together. Further clients get any
/// place.
const MAX_CLIENTS: usize = 65_536;
/// The least clients of one place, however many places there are.
const MIN_CLIENTS: usize = 64;
const PREFIX: &str = "affinity-";

/// The affinity of a chain.
pub(super) struct Affinity {
    seconds: u32,
    /// The port of the service, in names of sets.
    port: String,
    /// The most clients of a place.
    room: usize,
}

/// A place to which a chain leads.
pub(super) struct Place {
    /// Its name, in the name of its set.
    pub name: String,
    /// The rule that leads there.
    pub rule: String,
}

/// Sets of clients by name: whether the clients have IPv6 addresses, and how many there may be.
pub(super) type Sets = BTreeMap<String, (bool, usize)>;

/// Returns an address as it may stand in a name.
pub(super) fn named(address: IpAddr) -> String {
    address.to_string().replace(':', "_")
}

impl Affinity {
    /// Returns none without affinity. `ports`: how many the service has; `places`: how many this port has.
    pub fn new(
        (service, protocol, port): (IpAddr, u8, u16),
        seconds: u32,
        ports: usize,
        places: usize,
    ) -> Option<Self> {
        let made = || Self {
            seconds,
            port: format!("{protocol}-{}-{port}", named(service)),
            room: (MAX_CLIENTS / (ports * places).max(1)).max(MIN_CLIENTS),
        };
        (seconds > 0 && places > 0).then(made)
    }

    fn set(&self, place: &Place) -> String {
        format!("{PREFIX}{}-{}", self.port, place.name)
    }

    /// Adds the sets of a chain.
    pub fn add_sets(&self, places: &[Place], is_v6: bool, sets: &mut Sets) {
        for place in places {
            let (_, room) = sets.entry(self.set(place)).or_insert((is_v6, self.room));
            *room = self.room.max(*room);
        }
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
            chain_text(&format!("port-{chain}-{index}"), &[keep, place.rule.clone()])
        });
        each.collect()
    }
}

fn client(is_v6: bool) -> &'static str {
    if is_v6 { "ip6 saddr" } else { "ip saddr" }
}

/// Returns the text of a set.
pub(super) fn set_text((name, (is_v6, room)): (&String, &(bool, usize))) -> String {
    let family = if *is_v6 { "ipv6_addr" } else { "ipv4_addr" };
    format!("  set {name} {{\n    type {family}; size {room}; flags dynamic,timeout\n  }}")
}

/// Returns the commands that remove all that the table has.
pub(super) fn removal() -> String {
    format!("table inet {NFT_TABLE} {{\n}}\ndelete table inet {NFT_TABLE}\n")
}

/// Whether a text has sets of clients.
pub(super) fn has_clients(text: &str) -> bool {
    text.contains(&format!("set {PREFIX}"))
}

/// Returns the commands that remove what the table has, except the sets of clients that its new text has too; none if
/// there is no such set. `there`: what the kernel has of the family, each with its kind.
pub(super) fn removal_but_for_clients(there: &[(String, Value)], text: &str) -> Option<String> {
    let own = there.iter().filter(|(_, object)| object["table"] == NFT_TABLE);
    let named: Vec<_> = own
        .filter_map(|(kind, object)| Some((kind.as_str(), object["name"].as_str()?)))
        .collect();
    let stays = |(kind, name): &(&str, &str)| {
        *kind == "set" && name.starts_with(PREFIX) && text.contains(&format!("set {name} {{"))
    };
    let (stay, go): (Vec<_>, Vec<_>) = named.into_iter().partition(stays);
    if stay.is_empty() {
        return None;
    }
    let mut commands = format!("flush table inet {NFT_TABLE}\n");
    // Elements of maps lead to chains.
    for kinds in [&["map", "set"][..], &["counter", "chain"]] {
        for (kind, name) in go.iter().filter(|(kind, _)| kinds.contains(kind)) {
            let _ = writeln!(commands, "delete {kind} inet {NFT_TABLE} {name}");
        }
    }
    Some(commands)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use serde_json::json;

    use super::*;

    const SERVICE: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 96, 0, 7));

    fn place(name: usize) -> Place {
        Place {
            name: name.to_string(),
            rule: "accept".to_owned(),
        }
    }

    fn sets(ports: usize, places: usize) -> Sets {
        let affinity = Affinity::new((SERVICE, 6, 80), 60, ports, places).unwrap();
        let places: Vec<_> = (0..places).map(place).collect();
        let mut sets = Sets::new();
        affinity.add_sets(&places, false, &mut sets);
        sets
    }

    #[test]
    fn clients_that_a_service_keeps_have_a_bound() {
        for (ports, places) in [(1, 1), (1, 3), (128, 8), (1, 1024), (4, 256)] {
            let rooms = sets(ports, places);
            let together = ports * rooms.values().map(|(_, room)| room).sum::<usize>();
            assert!(
                together <= MAX_CLIENTS,
                "{ports} ports of {places} places: {together}"
            );
            assert!(rooms.values().all(|(_, room)| *room >= MIN_CLIENTS));
        }
        assert!(Affinity::new((SERVICE, 6, 80), 0, 1, 1).is_none());
        assert!(
            Affinity::new((SERVICE, 6, 80), 60, 1, 0).is_none(),
            "nothing to choose from"
        );
    }

    #[test]
    fn all_but_clients_with_a_place_goes() {
        let object =
            |kind: &str, name: &str, table: &str| (kind.to_owned(), json!({"name": name, "table": table}));
        let there = [
            ("table".to_owned(), json!({"name": "thuban"})),
            object("counter", "lost", "thuban"),
            object("set", "affinity-6-10.96.0.7-80-1", "thuban"),
            object("set", "affinity-6-10.96.0.7-80-12", "thuban"),
            object("set", "affinity-6-10.96.0.7-80-1", "other"),
            object("map", "ports", "thuban"),
            object("chain", "port-0", "thuban"),
        ];
        let sets = sets(1, 12);
        let text: String = sets.iter().map(set_text).collect();
        assert!(has_clients(&text));
        assert_eq!(
            removal_but_for_clients(&there, &text).unwrap(),
            "flush table inet thuban\n\
             delete set inet thuban affinity-6-10.96.0.7-80-12\n\
             delete map inet thuban ports\n\
             delete counter inet thuban lost\n\
             delete chain inet thuban port-0\n"
        );
        assert_eq!(
            removal_but_for_clients(&there[3..], &text),
            None,
            "no client stays"
        );
        assert_eq!(
            removal_but_for_clients(&there, "set affinity-6-10.96.0.7-80-13 {"),
            None
        );
    }
}
