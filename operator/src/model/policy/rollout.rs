//! The steps in which the endpoints of a VPC pass from old policies to new ones.
//!
//! | step | what droplets are sent | until |
//! |---|---|---|
//! | Prepares | rows of new classes and sets, by which no endpoint is judged yet | all have acked |
//! | Classes | local rows with new classes | all have acked |
//! | Sets | local rows with new sets | all have acked |
//!
//! Changes that come meanwhile wait for the next round. A round whose sets name no other groups than those before has
//! no step Classes.
//!
//! A new leader does not know what the one before it published. Its first round has all steps, but the local rows say
//! from the beginning what the policies say: the row of the VPC says what endpoints keep of what they had ([`Kept`]).
//!
//! A droplet refuses a class or set if it knows other content under the id: an earlier leader met two contents of one
//! hash in another order. The content gets another id then, and the round begins anew.
//!
//! A class has only the groups and names that sets of the VPC name: policies that select no pod of the VPC cost it
//! nothing, whatever they name. As long as a set is in use or rests, classes have what it names, because policies
//! retain their groups (`Policies::that_retain`).
//!
//! Invariant: in each direction, a packet between endpoints is judged as the policies before the round or those after
//! it say, or is denied.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;

use thuban_rows::{Kept, PolicyId, PolicyPorts};

use super::registry::Registry;
use super::set_room::{NoSetRoom, SetRoom};
use super::sets::{ClassContent, SetContent};
use super::{Applied, Policies};

/// What the local row of an endpoint says of policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Assignment {
    /// None: policy is not enforced in the VPC.
    pub class: Option<PolicyId>,
    pub ingress: Option<PolicyId>,
    pub egress: Option<PolicyId>,
}

/// What policies say of an endpoint.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// With all groups of all policies.
    class: Arc<ClassContent>,
    ingress: Option<PolicyId>,
    egress: Option<PolicyId>,
}

/// What the sets of a VPC name.
#[derive(Debug, Default, PartialEq, Eq)]
struct Named {
    groups: BTreeSet<u64>,
    names: BTreeSet<Arc<str>>,
}

impl Named {
    /// Adds what a set names. Returns whether anything is new.
    fn add(&mut self, set: &SetContent) -> bool {
        let before = self.groups.len() + self.names.len();
        for rule in &set.rules {
            self.groups.extend(&rule.groups);
            for ports in &rule.ports {
                if let PolicyPorts::Named(name, _) = ports {
                    self.names.insert(Arc::clone(name));
                }
            }
        }
        self.groups.len() + self.names.len() > before
    }

    /// Returns the part of a class that sets can ask about.
    fn of(&self, class: &ClassContent) -> ClassContent {
        let names = class.names.iter();
        ClassContent {
            groups: class.groups.intersection(&self.groups).copied().collect(),
            names: names
                .filter(|port| self.names.contains(port.name.as_str()))
                .cloned()
                .collect(),
        }
    }
}

#[derive(Debug, Default)]
struct Member {
    /// What the present policies say.
    wanted: Wanted,
    /// What the round leads to; none: it doesn't change the endpoint.
    target: Option<Assignment>,
    published: Assignment,
    /// [`Rollout::scope`] when the endpoint was fresh.
    scope: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Step {
    #[default]
    Settled,
    Prepares,
    Classes,
    Sets,
}

/// What changed in the rows of a VPC.
#[derive(Debug)]
pub struct News<E> {
    /// Endpoints whose local row says something else.
    pub endpoints: Vec<E>,
    /// Classes whose row came or went.
    pub classes: Vec<PolicyId>,
    pub sets: Vec<PolicyId>,
    /// The row of the VPC says something else of what endpoints keep.
    pub has_other_kept: bool,
}

impl<E> Default for News<E> {
    fn default() -> Self {
        Self {
            endpoints: Vec::new(),
            classes: Vec::new(),
            sets: Vec::new(),
            has_other_kept: false,
        }
    }
}

/// The policy of a VPC, by its endpoints.
#[derive(Debug)]
pub struct Rollout<E> {
    members: BTreeMap<E, Member>,
    classes: Registry<ClassContent>,
    sets: Registry<SetContent>,
    room: SetRoom,
    /// Sets are gone, so that there is room for others.
    has_freed: bool,
    /// What sets name that are in use or rest.
    named: Named,
    /// The narrowed classes, by the address of what policies say.
    narrowed: HashMap<usize, (Arc<ClassContent>, PolicyId)>,
    is_enforced: bool,
    step: Step,
    /// What endpoints keep in a new leader's first round; none: it is another round.
    takeover: Option<Kept>,
    /// How often sets came to name more.
    scope: u64,
    /// The scope that the round knows.
    round: u64,
    /// The version of the policies that the round leads to.
    version: u64,
    /// The version of the policies that all droplets know.
    known: u64,
    /// The scope that all published classes know; none: endpoints have no class.
    covered: Option<u64>,
    /// Something changed since the last round began.
    is_dirty: bool,
    news: News<E>,
}

impl<E> Default for Rollout<E> {
    fn default() -> Self {
        Self {
            members: BTreeMap::new(),
            classes: Registry::default(),
            sets: Registry::default(),
            room: SetRoom::default(),
            has_freed: false,
            named: Named::default(),
            narrowed: HashMap::new(),
            is_enforced: false,
            step: Step::default(),
            takeover: None,
            scope: 0,
            round: 0,
            version: 0,
            known: 0,
            covered: None,
            is_dirty: false,
            news: News::default(),
        }
    }
}

impl<E: Ord + Clone> Rollout<E> {
    /// Returns what policies say of an endpoint of a namespace, for [`Self::set`]. An error says why a set denies all
    /// instead.
    pub fn want(&mut self, namespace: &str, applied: &Applied) -> (Wanted, Result<(), NoSetRoom>) {
        let mut has_room = Ok(());
        let mut intern = |set: &SetContent| {
            if let Some(id) = self.sets.id(set) {
                return id;
            }
            if let Err(error) = self.room.admit(namespace, set) {
                if set.says_anything() {
                    has_room = Err(error);
                }
                return self.intern(namespace, &SetContent::deny_all(set.direction()));
            }
            self.intern(namespace, set)
        };
        let wanted = Wanted {
            class: Arc::new(applied.class.clone()),
            ingress: applied.ingress.as_ref().map(&mut intern),
            egress: applied.egress.as_ref().map(&mut intern),
        };
        (wanted, has_room)
    }

    fn intern(&mut self, namespace: &str, set: &SetContent) -> PolicyId {
        if self.named.add(set) {
            self.scope += 1;
            self.narrowed.clear();
        }
        let id = self.sets.intern(set);
        self.room.take(namespace, id, set);
        id
    }

    /// Sets what policies say of an endpoint. The row of a fresh endpoint, for which no packet flows yet, says so at
    /// once; others wait for a round.
    pub fn set(&mut self, endpoint: &E, wanted: &Wanted, is_fresh: bool) {
        let member = self.members.entry(endpoint.clone()).or_default();
        let is_new = member.wanted != *wanted;
        member.wanted.clone_from(wanted);
        if !is_fresh {
            self.is_dirty |= is_new;
            return;
        }
        member.target = None;
        member.scope = self.scope;
        let desired = self.desired(wanted);
        self.send(desired);
        self.publish(endpoint, desired);
        self.is_dirty |= self.is_pending(endpoint);
    }

    pub fn remove(&mut self, endpoint: &E) {
        self.is_dirty |= self.members.remove(endpoint).is_some();
    }

    /// Begins to enforce policy in the VPC: all its droplets can.
    pub fn enforce(&mut self) {
        self.is_dirty |= !self.is_enforced;
        self.is_enforced = true;
    }

    pub const fn is_enforced(&self) -> bool {
        self.is_enforced
    }

    /// Whether an endpoint has a set. Without one nobody asks for classes.
    fn is_active(&self) -> bool {
        self.is_enforced && !self.sets.is_empty()
    }

    /// Returns what the local row of an endpoint should say.
    fn desired(&mut self, wanted: &Wanted) -> Assignment {
        if !self.is_active() {
            return Assignment::default();
        }
        let address = Arc::as_ptr(&wanted.class).addr();
        let known = self.narrowed.get(&address).map(|(_, id)| *id);
        let class = known.unwrap_or_else(|| {
            let id = self.classes.intern(&self.named.of(&wanted.class));
            // The class keeps its address for as long as it is here.
            self.narrowed.insert(address, (Arc::clone(&wanted.class), id));
            id
        });
        Assignment {
            class: Some(class),
            ingress: wanted.ingress,
            egress: wanted.egress,
        }
    }

    fn send(&mut self, assignment: Assignment) {
        let class = assignment.class.filter(|id| self.classes.send(*id));
        self.news.classes.extend(class);
        let sets = [assignment.ingress, assignment.egress].into_iter().flatten();
        let sets = sets.filter(|id| self.sets.send(*id));
        self.news.sets.extend(sets);
    }

    fn publish(&mut self, endpoint: &E, assignment: Assignment) {
        if let Some(member) = self.members.get_mut(endpoint)
            && member.published != assignment
        {
            member.published = assignment;
            self.news.endpoints.push(endpoint.clone());
        }
    }

    /// Begins a round, if none is under way and something changed. All endpoints have been set by these policies.
    /// Returns whether a step waits for acks of what is sent from now on.
    pub fn begin(&mut self, policies: &Policies, now: u64) -> bool {
        if self.step != Step::Settled {
            return false;
        }
        self.version = policies.version();
        if !(self.is_dirty || self.has_unused()) {
            self.known = self.version;
            return false;
        }
        self.is_dirty = false;
        self.sweep(now);
        self.round = self.scope;
        let mut members = std::mem::take(&mut self.members);
        for member in members.values_mut() {
            let desired = self.desired(&member.wanted);
            member.target = (desired != member.published).then_some(desired);
            self.send(desired);
        }
        self.members = members;
        let waits = [self.classes.await_all(), self.sets.await_all()];
        self.step = Step::Prepares;
        if waits == [false; 2] {
            return self.acked();
        }
        true
    }

    /// Goes on: all droplets have acked what the step sent. Returns whether the next one waits for acks too.
    pub fn acked(&mut self) -> bool {
        match self.step {
            Step::Settled => return false,
            Step::Prepares => {
                self.classes.acked();
                self.sets.acked();
                if self.takeover == Some(Kept::All) {
                    self.keep(Some(Kept::Sets));
                    self.step = Step::Classes;
                    return true;
                }
                if self.members.values().all(|member| member.target.is_none()) {
                    return self.end_round();
                }
                if self.is_active() && self.covered.is_none_or(|covered| self.round > covered) {
                    self.publish_targets(|target, published| Assignment {
                        class: target.class,
                        ..published
                    });
                    self.step = Step::Classes;
                    return true;
                }
            }
            Step::Classes => {
                self.covered = Some(self.round);
                self.keep(self.takeover.map(|_| Kept::Nothing));
            }
            Step::Sets => {
                // What is no longer in use begins to rest.
                self.is_dirty = true;
                return self.end_round();
            }
        }
        self.publish_targets(|target, _| target);
        self.step = Step::Sets;
        true
    }

    /// Notes that a droplet knows another class under the id. Returns whether the class gets another id.
    pub fn refuse_class(&mut self, id: PolicyId) -> bool {
        if self.classes.refuse(id).is_none() {
            return false;
        }
        self.narrowed.clear();
        self.begin_anew();
        true
    }

    /// As [`Self::refuse_class`], of a set.
    pub fn refuse_set(&mut self, id: PolicyId) -> bool {
        let Some(new) = self.sets.refuse(id) else {
            return false;
        };
        self.room.rename(id, new);
        for member in self.members.values_mut() {
            for wanted in [&mut member.wanted.ingress, &mut member.wanted.egress] {
                if *wanted == Some(id) {
                    *wanted = Some(new);
                }
            }
        }
        self.begin_anew();
        true
    }

    /// Ends the round where it is: what was published stays until the next one. Some droplet judges by other content.
    fn begin_anew(&mut self) {
        for member in self.members.values_mut() {
            member.target = None;
        }
        self.keep(None);
        self.step = Step::Settled;
        self.known = 0;
        self.is_dirty = true;
    }

    fn end_round(&mut self) -> bool {
        for member in self.members.values_mut() {
            member.target = None;
        }
        self.covered = self.is_active().then_some(self.round);
        self.keep(None);
        self.step = Step::Settled;
        self.known = self.version;
        false
    }

    fn publish_targets(&mut self, assignment: impl Fn(Assignment, Assignment) -> Assignment) {
        for (endpoint, member) in &mut self.members {
            let Some(target) = member.target else { continue };
            let new = assignment(target, member.published);
            if member.published != new {
                member.published = new;
                self.news.endpoints.push(endpoint.clone());
            }
        }
    }

    /// Lets the rows of all endpoints say at once what policies say.
    pub fn publish_all(&mut self, now: u64) {
        self.sweep(now);
        let all = self.members.iter();
        let all: Vec<(E, Wanted)> = all
            .map(|(endpoint, member)| (endpoint.clone(), member.wanted.clone()))
            .collect();
        for (endpoint, wanted) in all {
            let desired = self.desired(&wanted);
            self.send(desired);
            self.publish(&endpoint, desired);
        }
        self.covered = self.is_active().then_some(self.scope);
        self.step = Step::Settled;
        self.is_dirty = true;
    }

    /// Begins the first round of a new leader, after [`Self::publish_all`]: droplets have had another one's program.
    /// Returns whether a step waits for acks.
    pub fn take_over(&mut self, policies: &Policies) -> bool {
        if !self.is_active() {
            return false;
        }
        self.version = policies.version();
        self.round = self.scope;
        self.covered = None;
        self.classes.await_all();
        self.sets.await_all();
        self.keep(Some(Kept::All));
        self.step = Step::Prepares;
        true
    }

    /// Returns what the VPC's row says that endpoints keep.
    pub fn kept(&self) -> Kept {
        self.takeover.unwrap_or_default()
    }

    fn keep(&mut self, takeover: Option<Kept>) {
        self.news.has_other_kept |= self.kept() != takeover.unwrap_or_default();
        self.takeover = takeover;
    }

    /// Forgets what has not been in use for a while. Classes lose what no set names any more.
    fn sweep(&mut self, now: u64) {
        let (mut classes, mut sets) = (HashSet::new(), HashSet::new());
        for member in self.members.values() {
            sets.extend([member.wanted.ingress, member.wanted.egress]);
            for used in [member.target.unwrap_or_default(), member.published] {
                classes.insert(used.class);
                sets.extend([used.ingress, used.egress]);
            }
        }
        let gone = self.sets.sweep(|id| sets.contains(&Some(id)), now);
        self.news.sets.extend(gone);
        self.has_freed |= self.room.retain(|id| self.sets.has(id));
        let gone = self.classes.sweep(|id| classes.contains(&Some(id)), now);
        self.news.classes.extend(gone);
        self.narrowed.clear();
        self.named = Named::default();
        for set in self.sets.contents() {
            self.named.add(set);
        }
    }

    fn has_unused(&self) -> bool {
        self.classes.has_unused() || self.sets.has_unused()
    }

    /// Whether a round can begin for something that changed.
    pub fn is_dirty(&self) -> bool {
        self.is_dirty && self.step == Step::Settled
    }

    /// Whether nothing is left of policy in the VPC: no set, and no endpoint with a class.
    pub fn is_over(&self) -> bool {
        let has_none = |member: &Member| member.published == Assignment::default();
        self.sets.is_empty()
            && self.step == Step::Settled
            && self.classes.rows().next().is_none()
            && self.members.values().all(has_none)
    }

    /// Whether sets have gone since the last call, so that endpoints may have others than those that deny all.
    pub fn take_freed(&mut self) -> bool {
        std::mem::take(&mut self.has_freed)
    }

    pub fn take_news(&mut self) -> News<E> {
        std::mem::take(&mut self.news)
    }

    /// Whether all droplets that aren't suspect judge by the policies of this version.
    pub const fn knows(&self, version: u64) -> bool {
        self.known >= version
    }

    /// Returns what the endpoint's local row says.
    pub fn published(&self, endpoint: &E) -> Assignment {
        let member = self.members.get(endpoint);
        member.map(|member| member.published).unwrap_or_default()
    }

    /// Whether droplets may still lack what they judge a fresh endpoint's packets by.
    pub fn is_pending(&self, endpoint: &E) -> bool {
        let Some(member) = self.members.get(endpoint) else {
            return false;
        };
        let Assignment {
            class,
            ingress,
            egress,
        } = member.published;
        let has_sets = ingress.or(egress).is_some();
        // What endpoints keep of an earlier leader may not be known to droplets that are new in the VPC, or, if they
        // were not ready then, to any other droplet.
        self.takeover.is_some()
            || class.is_some_and(|id| !self.classes.is_known(id))
            || egress.is_some_and(|id| !self.sets.is_known(id))
            || ingress.is_some_and(|id| self.sets.is_refused(id))
            || has_sets && self.covered.is_none_or(|covered| member.scope > covered)
    }

    pub fn has(&self, endpoint: &E) -> bool {
        self.members.contains_key(endpoint)
    }

    /// Returns the content of the class's row, if it has one.
    pub fn class(&self, id: PolicyId) -> Option<&ClassContent> {
        self.classes.row(id)
    }

    /// Returns the content of the set's row, if it has one.
    pub fn set_content(&self, id: PolicyId) -> Option<&SetContent> {
        self.sets.row(id)
    }

    /// Yields the ids of all rows of classes.
    pub fn class_rows(&self) -> impl Iterator<Item = PolicyId> {
        self.classes.rows()
    }

    pub fn set_rows(&self) -> impl Iterator<Item = PolicyId> {
        self.sets.rows()
    }

    /// Adds the groups and names of ports that sets in use name.
    pub fn add_named(&self, groups: &mut BTreeSet<u64>, names: &mut BTreeSet<Arc<str>>) {
        groups.extend(&self.named.groups);
        names.extend(self.named.names.iter().cloned());
    }
}
