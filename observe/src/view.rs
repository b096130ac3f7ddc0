//! What a reader may see. Pure.
//!
//! Invariant: a reader of a namespace gets flows that have an end in it, and nothing about an end in another namespace:
//! neither name, address, port, network nor place. Nor does it get the VPC of such an end, if its own end is in another
//! one. Filters look only at what the reader sees, so no filter tells what is withheld.

mod line;

use std::net::IpAddr;

pub use line::{lost_line, write_line};

use crate::flow::{End, Flow};
use crate::names::{Kind, Name, Who};

/// Whose flows a reader has asked for, and may read.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Scope {
    All,
    Namespace(String),
}

impl Scope {
    /// Returns the namespace; none if all were asked for.
    pub fn namespace(&self) -> Option<&str> {
        match self {
            Self::All => None,
            Self::Namespace(namespace) => Some(namespace),
        }
    }

    /// Whether what has an address is the reader's.
    pub fn owns(&self, who: &Who) -> bool {
        self.namespace().is_none_or(|namespace| who.is_of(namespace))
    }

    /// Returns what the reader may see of an end. Nodes, and addresses that nobody has, are in no namespace.
    pub fn shown<'a>(&self, end: &'a End) -> Option<&'a End> {
        let is_shown = match &end.who {
            Some(who) => who.namespace.is_none() || self.owns(who),
            None => *self == Self::All || !end.is_doubtful,
        };
        is_shown.then_some(end)
    }

    /// Returns the VPC of a flow, if an end there is the reader's. Other VPCs may share a Service of the VPC `default`:
    /// the Service's namespace does not see which.
    pub fn vpc<'a>(&self, flow: &'a Flow) -> Option<&'a Name> {
        let vpc = flow.vpc.as_ref()?;
        let is_there = |end: &End| {
            end.who
                .as_ref()
                .is_some_and(|who| self.owns(who) && who.vpc == *vpc)
        };
        (*self == Self::All || is_there(&flow.from) || is_there(&flow.to)).then_some(vpc)
    }

    fn owns_end(&self, end: &End) -> bool {
        *self == Self::All || end.who.as_ref().is_some_and(|who| self.owns(who))
    }

    /// Whether the reader sees anything of a flow.
    pub fn sees(&self, flow: &Flow) -> bool {
        self.owns_end(&flow.from) || self.owns_end(&flow.to)
    }

    /// Returns the droplet that told of a flow, if it is the place of no end that is withheld.
    pub fn droplet<'a>(&self, flow: &'a Flow) -> Option<&'a str> {
        let ends = [self.shown(&flow.from), self.shown(&flow.to)];
        if ends.iter().all(Option::is_some) {
            return Some(&flow.droplet);
        }
        let mut places = ends
            .into_iter()
            .flatten()
            .filter_map(|end| end.who.as_ref()?.droplet.as_ref());
        places
            .any(|place| *place == flow.droplet)
            .then_some(&*flow.droplet)
    }
}

/// An address, or namespace and name of a pod or Service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Peer {
    Address(IpAddr),
    Named { namespace: String, name: String },
}

impl Peer {
    fn is(&self, end: &End) -> bool {
        match self {
            Self::Address(address) => end.address == *address,
            Self::Named { namespace, name } => end
                .who
                .as_ref()
                .is_some_and(|who| who.is_of(namespace) && who.name.as_deref() == Some(name.as_str())),
        }
    }
}

/// Which flows a reader wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Filter {
    pub vpc: Option<String>,
    /// The name of a pod at one end.
    pub pod: Option<String>,
    /// What is at the other end.
    pub peer: Option<Peer>,
    /// Drops alone, or passed packets alone.
    pub is_dropped: Option<bool>,
}

/// A question for flows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Query {
    pub scope: Scope,
    pub filter: Filter,
}

impl Query {
    /// Whether a flow belongs to the answer.
    pub fn accepts(&self, flow: &Flow) -> bool {
        let filter = &self.filter;
        if filter.vpc.is_some() && filter.vpc.as_deref() != self.scope.vpc(flow).map(|vpc| &**vpc)
            || filter
                .is_dropped
                .is_some_and(|is_dropped| is_dropped != flow.is_dropped())
        {
            return false;
        }
        [(&flow.from, &flow.to), (&flow.to, &flow.from)]
            .into_iter()
            .any(|(own, other)| self.has_ends(own, other))
    }

    fn has_ends(&self, own: &End, other: &End) -> bool {
        let is_pod = |name: &str| {
            let pod = own.named(Kind::Pod);
            pod.is_some_and(|pod| pod.name.as_deref() == Some(name))
        };
        self.scope.owns_end(own)
            && self.filter.pod.as_deref().is_none_or(is_pod)
            && self
                .filter
                .peer
                .as_ref()
                .is_none_or(|peer| self.scope.shown(other).is_some_and(|other| peer.is(other)))
    }
}

#[cfg(test)]
mod tests;
