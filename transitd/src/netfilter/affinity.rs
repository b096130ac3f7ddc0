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

use super::nft::Nft;
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

/// Returns the commands that remove what the table has, except the sets of clients that its new text has too; none if
/// there is no such set.
pub(super) fn removal_but_for_clients(nft: &Nft, text: &str) -> Option<String> {
    if !text.contains(&format!("set {PREFIX}")) {
        return None;
    }
    // Without the elements, which nft would read if it were asked for one table.
    let listed = nft.list(&["-j", "-t", "list", "ruleset", "inet"])?;
    removal_of(&listed, text)
}

fn removal_of(listed: &[u8], text: &str) -> Option<String> {
    let listed: Value = serde_json::from_slice(listed).ok()?;
    let objects = listed["nftables"].as_array()?.iter();
    let objects = objects.flat_map(|object| object.as_object().into_iter().flatten());
    let own = objects.filter(|(_, object)| object["table"] == NFT_TABLE);
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
