//! Takes out of upstream's answers what a VPC must not see.
//!
//! Invariant: an answer says the same whether a name that the VPC must not see is there or not. So negative answers of the
//! cluster's domain and of addresses are all made here, and an alias that leads out of the view leads nowhere.

use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::{Name, RData, Record};

use super::query::Question;
use super::view::{View, Zone};

/// The answer that is sent in place of upstream's.
#[derive(Debug)]
pub(super) struct Filtered {
    pub(super) message: Message,
    /// Whether upstream's had what this has not.
    pub(super) less: bool,
}

/// None if the answer may go as it came. It is one to `question`, which asks for a name of `zone`, and not truncated.
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
            // What CoreDNS says of an address that nobody has.
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
    // These only help, and which of them are there may itself tell.
    for section in [&mut answer.authorities, &mut answer.additionals] {
        if section.iter().any(is_hidden) {
            section.clear();
            less = true;
        }
    }
    // It is no longer what somebody signed.
    answer.metadata.authentic_data &= !less;
    less.then_some(Filtered {
        message: answer,
        less,
    })
}

/// The names in a record that lead to others.
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
