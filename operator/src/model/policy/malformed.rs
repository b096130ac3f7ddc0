//! What is wrong with a policy, for the person who wrote it.

use std::fmt::Display;

use thiserror::Error;

/// A field of a policy, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{field}: {problem}")]
pub struct Malformed {
    /// As a path, such as `spec.ingress[0].from[1].podSelector`.
    pub field: String,
    pub problem: Problem,
}

#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Problem {
    #[error("{0:?} is not an operator; use In, NotIn, Exists or DoesNotExist")]
    Operator(String),
    #[error("In and NotIn need at least one value")]
    NoValues,
    #[error("Exists and DoesNotExist take no values")]
    Values,
    #[error("{0:?} is not the key of a label, such as app or example.com/app")]
    Key(String),
    #[error("{0:?} is not the value of a label: at most 63 letters, digits, '-', '_' and '.'")]
    Value(String),
    #[error("{0:?} is not a protocol with ports; use TCP, UDP or SCTP")]
    Protocol(String),
    #[error("{0} is not a port, 1 to 65535")]
    Port(i32),
    #[error("the name of a port is empty")]
    EmptyName,
    #[error("a last port needs the number of a first port that is not greater")]
    LastPort,
    #[error("{0:?} is not a network in CIDR notation, such as 10.0.0.0/16 or fd00:1::/64")]
    Network(String),
    #[error("{0:?} is not within the block")]
    Except(String),
    #[error("{0:?} is not a type of policy; use Ingress or Egress")]
    PolicyType(String),
    #[error("needs exactly one field, and one that is known here")]
    Unknown,
    #[error("needs at least one peer")]
    NoPeers,
    #[error("is not a known tier; use Admin or Baseline")]
    Tier,
    #[error("is not a known action, so the rule denies; use Accept, Deny or Pass")]
    Action,
    #[error(
        "domain names are not supported: an Accept rule accepts nobody by them, any other rule denies everybody; use \
         networks"
    )]
    DomainNames,
}

impl Malformed {
    pub fn new(field: impl Into<String>, problem: Problem) -> Self {
        let field = field.into();
        Self { field, problem }
    }

    /// Puts the object around the field before it.
    #[must_use]
    pub fn within(self, parent: impl Display) -> Self {
        let field = match self.field.as_str() {
            "" => parent.to_string(),
            inner => format!("{parent}.{inner}"),
        };
        Self { field, ..self }
    }
}

/// Reads the items of a list. An error names the item.
pub fn each<T, R>(
    list: &str,
    items: &[T],
    mut read: impl FnMut(&T) -> Result<R, Malformed>,
) -> Result<Vec<R>, Malformed> {
    let item =
        |(index, item)| read(item).map_err(|malformed| malformed.within(format_args!("{list}[{index}]")));
    items.iter().enumerate().map(item).collect()
}
