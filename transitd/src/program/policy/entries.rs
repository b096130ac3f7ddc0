//! The entries of a set: what they are, whether there is room for them, and the order in which they are written.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use thuban_api::identifiers::Vni;
use thuban_common::policy::{
    GRANT_ASKS_BLOCKS, GRANT_DENIES, GrantKey, PEER_OTHER, PEER_OUTSIDE, SHARED_SERVICE_CLASS, of_vpc,
};
use thuban_rows::{Class, PolicyId, PolicySet, SHARED_SERVICE_GROUP};

use super::blocks::{self, Prefix};
use super::compile::{Look, Named, Set};
use super::former::Former;
use super::lists::{Content, Contents};
use super::outside;
use super::store::{NoRoom, Store, Usage};

#[derive(Debug)]
pub struct Entries {
    /// [`GrantKey::set`].
    own: u64,
    other: Content,
    outside: Content,
    /// The classes of which the set says something else than of those that it doesn't know.
    classes: Vec<(u64, Content)>,
    blocks: Vec<(Prefix, Content)>,
    /// What an ingress set costs nftables.
    cost: Option<usize>,
    /// Why some classes aren't among these, though the set says something else of them.
    lacking: Option<NoRoom>,
}

impl Entries {
    /// Compiles a set for these classes of its VPC and those without a row. An error doesn't depend on the classes.
    pub fn new(
        store: &Store,
        set: &Set,
        classes: &BTreeMap<PolicyId, Class>,
        former: Option<&Former>,
        contents: &mut Contents,
    ) -> Result<Self, NoRoom> {
        let row = set.row();
        let own = key(row.vni, row.id);
        let other = contents.add(set.of_unknown())?;
        let outside = contents.add(set.of_outside())?;
        let blocks = blocks::prefixes(row, contents)?;
        if blocks.len() > store.share().blocks {
            return Err(NoRoom::Set);
        }
        let cost = || outside::cost(row.is_isolated, &outside, &blocks);
        let cost = (!row.is_egress).then(cost).transpose()?;
        let rowless = [plain(row.vni), shared_service(row.vni)];
        // A client by a shared Service is never a destination.
        let rowless = &rowless[..if row.is_egress { 1 } else { 2 }];
        // Where not all have room, those that have a grant keep it.
        let has_grant = |class: &&Class| {
            let peer = key(class.vni, class.id);
            store.grant(&GrantKey { set: own, peer }).is_some()
        };
        let (mut ordered, others): (Vec<&Class>, Vec<&Class>) =
            rowless.iter().chain(classes.values()).partition(has_grant);
        ordered.extend(others);
        let mut by_look: HashMap<Look<'_>, Result<Content, NoRoom>> = HashMap::new();
        let (mut of_classes, mut lacking) = (Vec::new(), None);
        for class in ordered {
            let content = match by_look.entry(set.look(class, says(former, set, class))) {
                Entry::Occupied(known) => known.get().clone(),
                Entry::Vacant(place) => {
                    contents.work += row.rules.len();
                    let content = contents.add(set.of_classes(place.key()));
                    place.insert(content).clone()
                }
            };
            match content {
                Ok(content) if content == other => {}
                Ok(content) => of_classes.push((key(class.vni, class.id), content)),
                Err(why) => lacking = Some(why),
            }
        }
        Ok(Self {
            own,
            other,
            outside,
            classes: of_classes,
            blocks,
            cost,
            lacking,
        })
    }

    /// Whether present grants ask blocks that are to become others: a packet would be judged by old and new ones
    /// together.
    pub fn would_mix(&self, store: &Store) -> bool {
        let asks = |peer| {
            let grant = store.grant(&GrantKey { set: self.own, peer });
            grant.is_some_and(|grant| grant.flags & GRANT_ASKS_BLOCKS != 0)
        };
        if !store.peers(self.own).into_iter().any(asks) {
            return false;
        }
        let there: HashMap<Prefix, u32> = store.blocks(self.own, Prefix::ALL).collect();
        let is_there = |(prefix, content): &(Prefix, Content)| {
            let list = there.get(prefix);
            list.is_some_and(|list| store.content(*list) == *content)
        };
        there.len() != self.blocks.len() || !self.blocks.iter().all(is_there)
    }

    /// Drops the classes that there is no room for. Their packets are judged as those of unknown classes: the set
    /// accepts no more of these than of known ones. Returns why, if there are such classes. An error: there is no room
    /// for the other entries.
    pub fn admit(&mut self, store: &Store) -> Result<Option<NoRoom>, NoRoom> {
        let own = self.own;
        // Equal contents are one: see `Contents`.
        let mut counted = HashSet::new();
        let grants = |peer| usize::from(store.grant(&GrantKey { set: own, peer }).is_none());
        let mut needs = Usage {
            grants: grants(PEER_OTHER) + grants(PEER_OUTSIDE),
            ..Usage::default()
        };
        for (prefix, _) in &self.blocks {
            needs.blocks += usize::from(store.block(own, *prefix).is_none());
        }
        let of_blocks = self.blocks.iter().map(|(_, content)| content);
        for content in of_blocks.chain([&self.other, &self.outside]) {
            if counted.insert(content.as_ptr()) {
                needs.lists += store.parts_of(own, content);
            }
        }
        if let Some(cost) = self.cost {
            store.costs.admit(own, cost)?;
        }
        store.admit(own, needs)?;
        let mut lacking = self.lacking;
        let mut has_grants = true;
        self.classes.retain(|(class, content)| {
            let is_counted = counted.contains(&content.as_ptr());
            let more = Usage {
                grants: grants(*class),
                blocks: 0,
                lists: if is_counted {
                    0
                } else {
                    store.parts_of(own, content)
                },
            };
            if more.grants > 0 && !has_grants {
                return false;
            }
            if let Err(why) = store.admit(own, needs.plus(more)) {
                has_grants &= more.lists > 0;
                lacking = Some(why);
                return false;
            }
            needs = needs.plus(more);
            counted.insert(content.as_ptr());
            true
        });
        Ok(lacking)
    }

    /// Writes the entries in the place of those that the set has.
    pub fn write(&self, store: &mut Store, set: &Set, ranges: Option<&[Prefix]>) {
        let row = set.row();
        let own = self.own;
        if let Some(cost) = self.cost {
            store.costs.set(own, cost);
        }
        let wanted: HashSet<Prefix> = self.blocks.iter().map(|(prefix, _)| *prefix).collect();
        let there: Vec<_> = store.blocks(own, Prefix::ALL).collect();
        for (prefix, _) in there {
            if !wanted.contains(&prefix) {
                store.remove_block(own, prefix);
            }
        }
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
        // The last one that comes: until then a new set denies what has no entry yet.
        put(PEER_OTHER, &self.other, inside);
        let wanted: HashSet<u64> = self.peers().collect();
        for peer in store.peers(own) {
            if !wanted.contains(&peer) {
                store.remove_grant(GrantKey { set: own, peer });
            }
        }
    }

    fn peers(&self) -> impl Iterator<Item = u64> {
        let classes = self.classes.iter().map(|(class, _)| *class);
        classes.chain([PEER_OUTSIDE, PEER_OTHER])
    }
}

/// Makes a set deny all that comes, by the entry of [`PEER_OTHER`] alone.
pub fn deny_all(store: &mut Store, set: u64) {
    forget_cost(store, set);
    let key = |peer| GrantKey { set, peer };
    // Without any entry it denies all, too.
    if store.grant(&key(PEER_OTHER)).is_some() || store.admit(set, Usage::GRANT).is_ok() {
        store.put_grant(key(PEER_OTHER), &Content::from([]), GRANT_DENIES);
    }
    for peer in store.peers(set) {
        if peer != PEER_OTHER {
            store.remove_grant(key(peer));
        }
    }
    store.remove_blocks(set);
}

/// Removes all entries of a set, by which nothing is judged any more.
pub fn remove_all(store: &mut Store, set: u64) {
    forget_cost(store, set);
    for peer in store.peers(set) {
        store.remove_grant(GrantKey { set, peer });
    }
    store.remove_blocks(set);
}

fn forget_cost(store: &mut Store, set: u64) {
    let has_freed = store.costs.remove(set);
    store.has_freed |= has_freed;
}

/// Writes what a set that doesn't deny all says of a class that comes. An error: there is no room for the entry, and
/// the class is judged as unknown.
pub fn add_class(store: &mut Store, set: &Set, class: &Class, former: Option<&Former>) -> Result<(), NoRoom> {
    let row = set.row();
    let own = key(row.vni, row.id);
    let other = GrantKey {
        set: own,
        peer: PEER_OTHER,
    };
    let Some(other) = store.grant(&other) else {
        return Ok(());
    };
    let content =
        Contents::new(store.share().lists).add(set.of_classes(&set.look(class, says(former, set, class))))?;
    if content == store.content(other.list) {
        return Ok(());
    }
    let needs = Usage {
        lists: store.parts_of(own, &content),
        ..Usage::GRANT
    };
    store.admit(own, needs)?;
    let peer = key(class.vni, class.id);
    store.put_grant(GrantKey { set: own, peer }, &content, other.flags);
    Ok(())
}

/// Returns the groups and names that a class says whether it has them, to a set; `None`: all that the set names.
fn says<'a>(former: Option<&'a Former>, set: &Set, class: &Class) -> Option<&'a Named> {
    former?.says(set.row().id, class.id)
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

const _: () = assert!(PolicyId::SHARED_SERVICE.get() == SHARED_SERVICE_CLASS);

/// Returns the class of clients by a shared Service, which every set knows.
pub fn shared_service(vni: Vni) -> Class {
    Class {
        id: PolicyId::SHARED_SERVICE,
        groups: [SHARED_SERVICE_GROUP].into(),
        ..plain(vni)
    }
}

/// Returns a class or set as keys have it.
pub fn key(vni: Vni, id: PolicyId) -> u64 {
    of_vpc(vni.get(), id.get())
}
