//! Removes from upstream's answers what a VPC must not see.
//!
//! Invariant: an answer is the same whether a name that the VPC must not see exists or not. So all negative answers
//! about the cluster's domain and about addresses are made here, and an alias that leads out of the view leads
//! nowhere.

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, Record};

use super::query::Question;
use super::view::{View, Zone};

/// The answer that is sent in place of upstream's.
#[derive(Debug)]
pub(super) struct Filtered {
    pub(super) message: Message,
    /// Whether upstream's answer had records that this one lacks.
    pub(super) less: bool,
}

/// Returns `None` if the answer may go as it came. The answer is one to `question`, which asks for a name of `zone`,
/// and not truncated.
pub(super) fn filter(view: &View, zone: Zone, question: &Question, mut answer: Message) -> Option<Filtered> {
    let code = answer.metadata.response_code;
    let is_hidden = |record: &Record| names(record).any(|name| !view.shows(name));
    // A chain of aliases counts as a whole: CoreDNS leaves out one whose end isn't there.
    let is_cut = answer.answers.iter().any(|record| {
        let is_alias = matches!(record.data, RData::CNAME(_) | RData::ANAME(_));
        !view.shows(&record.name) || (is_alias && is_hidden(record))
    });
    let before = answer.answers.len();
    answer.answers.retain(|record| !is_cut && !is_hidden(record));
    let removed = before != answer.answers.len();
    let is_negative = matches!(code, ResponseCode::NoError | ResponseCode::NXDomain);
    if answer.answers.is_empty() && is_negative && (removed || zone != Zone::Outside) {
        let code = match zone {
            _ if !removed => code,
            // CoreDNS gives this answer for an address that nobody has.
            Zone::Reverse4 | Zone::Reverse6 => ResponseCode::NXDomain,
            Zone::Cluster | Zone::Outside => ResponseCode::NoError,
        };
        let message = question.negative(code, zone, view.domain());
        return Some(Filtered {
            message,
            less: removed,
        });
    }
    let mut less = removed;
    // These records only help, and their presence may itself reveal names.
    for section in [&mut answer.authorities, &mut answer.additionals] {
        if section.iter().any(is_hidden) {
            section.clear();
            less = true;
        }
    }
    // The answer is no longer the one that was signed.
    answer.metadata.authentic_data &= !less;
    less.then_some(Filtered {
        message: answer,
        less,
    })
}

/// Returns the names in a record that lead to others.
fn names(record: &Record) -> impl Iterator<Item = &Name> {
    let target = match &record.data {
        RData::ANAME(name) => Some(&name.0),
        RData::CNAME(name) => Some(&name.0),
        RData::HTTPS(service) => Some(&service.0.target_name),
        RData::MX(exchange) => Some(&exchange.exchange),
        RData::NAPTR(pointer) => Some(&pointer.replacement),
        RData::NS(name) => Some(&name.0),
        RData::PTR(name) => Some(&name.0),
        RData::SRV(service) => Some(&service.target),
        RData::SVCB(service) => Some(&service.target_name),
        _ => None,
    };
    std::iter::once(&record.name).chain(target)
}
