//! The entries of a set: what they are, whether there is room for them, and the order in which they are written.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};

use thuban_api::identifiers::Vni;
use thuban_common::policy::{GRANT_ASKS_BLOCKS, GRANT_DENIES, GrantKey, PEER_OTHER, PEER_OUTSIDE, of_vpc};
use thuban_rows::{Class, PolicyId, PolicySet};

use super::blocks::{self, Prefix};
use super::compile::{Look, Set};
use super::lists::{Content, Contents, TooMany};
use super::store::{Store, Usage};

#[derive(Debug)]
pub struct Entries {
    other: Content,
    outside: Content,
    /// The classes of which the set says something else than of those that it doesn't know.
    classes: Vec<(u64, Content)>,
    blocks: Vec<(Prefix, Content)>,
}

impl Entries {
    /// Compiles a set that has no entry or denies all, for these classes of its VPC and the plain one. An error: there
    /// is no room for the entries.
    pub fn new(store: &Store, set: &Set, classes: &BTreeMap<PolicyId, Class>) -> Result<Self, TooMany> {
        let row = set.row();
        let own = key(row.vni, row.id);
        let mut contents = Contents::new(store.share().lists);
        let other = contents.add(set.of_unknown())?;
        let outside = contents.add(set.of_outside())?;
        let plain = plain(row.vni);
        let mut by_look: HashMap<Look<'_>, Content> = HashMap::new();
        let mut of_classes = Vec::new();
        for class in classes.values().chain([&plain]) {
            let content = match by_look.entry(set.look(class)) {
                Entry::Occupied(known) => known.get().clone(),
                Entry::Vacant(place) => {
                    let content = contents.add(set.of_classes(place.key()))?;
                    place.insert(content).clone()
                }
            };
            if content != other {
                of_classes.push((key(class.vni, class.id), content));
            }
        }
        let entries = Self {
            other,
            outside,
            classes: of_classes,
            blocks: blocks::prefixes(row, &mut contents)?,
        };
        let other = GrantKey {
            set: own,
            peer: PEER_OTHER,
        };
        let has_other = store.grant(&other).is_some();
        let needs = Usage {
            grants: entries.classes.len() + if has_other { 1 } else { 2 },
            blocks: entries.blocks.len(),
            lists: contents.iter().map(|content| store.parts_of(own, content)).sum(),
        };
        store.has_room(own, needs).then_some(entries).ok_or(TooMany)
    }

    pub fn write(&self, store: &mut Store, set: &Set, ranges: Option<&[Prefix]>) {
        let row = set.row();
        let own = key(row.vni, row.id);
        for (prefix, content) in &self.blocks {
            store.put_block(own, *prefix, content);
        }
        let inside = flags_inside(store, row, ranges);
        let outside = flags(row, !self.blocks.is_empty());
        let mut put = |peer, content, flags| store.put_grant(GrantKey { set: own, peer }, content, flags);
        for (class, content) in &self.classes {
            put(*class, content, inside);
        }
        put(PEER_OUTSIDE, &self.outside, outside);
        // The last one: until then the set denies what has no entry yet.
        put(PEER_OTHER, &self.other, inside);
    }
}

/// Writes what a set that doesn't deny all says of a class that comes. An error: there is no room for the entry.
pub fn add_class(store: &mut Store, set: &Set, class: &Class) -> Result<(), TooMany> {
    let row = set.row();
    let own = key(row.vni, row.id);
    let other = GrantKey {
        set: own,
        peer: PEER_OTHER,
    };
    let Some(other) = store.grant(&other) else {
        return Ok(());
    };
    let content = Contents::new(store.share().lists).add(set.of_classes(&set.look(class)))?;
    if content == store.content(other.list) {
        return Ok(());
    }
    let needs = Usage {
        lists: store.parts_of(own, &content),
        ..Usage::GRANT
    };
    if !store.has_room(own, needs) {
        return Err(TooMany);
    }
    let peer = key(class.vni, class.id);
    store.put_grant(GrantKey { set: own, peer }, &content, other.flags);
    Ok(())
}

/// Returns the flags of a set's grants for peers in the VPC, whose ranges are these if they are known.
pub fn flags_inside(store: &Store, set: &PolicySet, ranges: Option<&[Prefix]>) -> u32 {
    let own = key(set.vni, set.id);
    let Some(ranges) = ranges else {
        return flags(set, store.blocks(own, Prefix::ALL).next().is_some());
    };
    // Whether the blocks say something of an address in the range. The last prefix that holds the range is the longest.
    let asks = |range: &Prefix| {
        let inner = store.blocks(own, *range);
        let inner = inner.take_while(|(prefix, _)| range.holds(prefix));
        let outer = store.blocks(own, Prefix::ALL);
        let outer = outer.filter(|(prefix, _)| prefix.holds(range)).last();
        inner.chain(outer).any(|(_, list)| list != 0)
    };
    flags(set, ranges.iter().any(asks))
}

fn flags(set: &PolicySet, asks_blocks: bool) -> u32 {
    let denies = if set.is_isolated { GRANT_DENIES } else { 0 };
    denies | if asks_blocks { GRANT_ASKS_BLOCKS } else { 0 }
}

/// Returns the class without groups and names, which every set knows.
pub fn plain(vni: Vni) -> Class {
    Class {
        vni,
        id: PolicyId::PLAIN,
        groups: BTreeSet::new(),
        names: BTreeSet::new(),
    }
}

/// Returns a class or set as keys have it.
pub fn key(vni: Vni, id: PolicyId) -> u64 {
    of_vpc(vni.get(), id.get())
}
