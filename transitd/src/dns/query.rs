//! Queries as pods send them, what is asked upstream in their place, and the answers made here.
//!
//! Invariant: no byte of a pod's message goes on as it came. The upstream query is made anew from the question and the
//! flags that were understood, so that this parser and upstream's can't differ about a name.

use hickory_proto::ProtoError;
use hickory_proto::op::{Edns, Header, Message, MessageType, Metadata, OpCode, Query, ResponseCode};
use hickory_proto::rr::rdata::SOA;
use hickory_proto::rr::{DNSClass, Name, RData, Record, RecordType};
use hickory_proto::serialize::binary::{BinDecodable, BinDecoder};

use super::view::{Domain, Zone};

/// The most bytes of a query. A name takes 255, options rarely more than 468 (RFC 8467).
pub(super) const MAX_QUERY_BYTES: usize = 1232;
/// The most bytes that are accepted by UDP, and announced: as many as pass every link unfragmented (DNS flag day
/// 2020).
const UDP_PAYLOAD: u16 = 1232;
/// The most bytes of an answer to a client without EDNS (RFC 1035, 4.2.1).
const PLAIN_PAYLOAD: u16 = 512;
/// How many seconds a refusal may be remembered; CoreDNS' own default.
const NEGATIVE_TTL: u32 = 5;
const HEADER: usize = 12;

/// The reason why a query goes no further.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// No answer: too short to have a header, or itself an answer.
    Silent,
    /// No message, or not a query with one question; the answer.
    Malformed(Option<Vec<u8>>),
    /// Understood and not done: other operations and classes, transfers of zones; the answer.
    Unsupported(Option<Vec<u8>>),
}

/// A query with one question, of class IN.
#[derive(Debug)]
pub(super) struct Question {
    header: Metadata,
    query: Query,
    edns: Option<ClientEdns>,
}

#[derive(Clone, Copy, Debug)]
struct ClientEdns {
    payload: u16,
    dnssec_ok: bool,
}

/// The query that is sent upstream.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) bytes: Vec<u8>,
    /// Where its question ends.
    end: usize,
}

impl Question {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self, Unfit> {
        let Ok(Header { metadata, counts }) = Header::read(&mut BinDecoder::new(bytes)) else {
            return Err(Unfit::Silent);
        };
        if metadata.message_type == MessageType::Response {
            return Err(Unfit::Silent);
        }
        let bare = |code| {
            Message::error_msg(metadata.id, metadata.op_code, code)
                .to_vec()
                .ok()
        };
        if metadata.op_code != OpCode::Query {
            return Err(Unfit::Unsupported(bare(ResponseCode::NotImp)));
        }
        let malformed = || Unfit::Malformed(bare(ResponseCode::FormErr));
        // This check comes before records are read: a query has no record but that of EDNS.
        let is_plain = counts.queries == 1 && counts.answers == 0 && counts.authorities == 0;
        if !is_plain || counts.additionals > 1 || bytes.len() > MAX_QUERY_BYTES {
            return Err(malformed());
        }
        let message = Message::from_vec(bytes).map_err(|_| malformed())?;
        let query = message.queries.into_iter().next().ok_or_else(malformed)?;
        let question = Self {
            header: metadata,
            query,
            edns: message.edns.as_ref().map(|edns| ClientEdns {
                payload: edns.max_payload().clamp(PLAIN_PAYLOAD, UDP_PAYLOAD),
                dnssec_ok: edns.flags().dnssec_ok,
            }),
        };
        let unsupported = |code| Err(Unfit::Unsupported(question.reply(code).to_vec().ok()));
        if message.edns.is_some_and(|edns| edns.version() != 0) {
            return unsupported(ResponseCode::BADVERS);
        }
        let is_transfer = matches!(question.record_type(), RecordType::AXFR | RecordType::IXFR);
        if is_transfer || question.query.query_class != DNSClass::IN {
            return unsupported(ResponseCode::Refused);
        }
        Ok(question)
    }

    pub(super) fn name(&self) -> &Name {
        &self.query.name
    }

    pub(super) fn record_type(&self) -> RecordType {
        self.query.query_type
    }

    /// Returns the most bytes of an answer by UDP.
    pub(super) fn payload(&self) -> usize {
        usize::from(self.edns.map_or(PLAIN_PAYLOAD, |edns| edns.payload))
    }

    /// Makes the query for upstream, with a random id. Options are hop by hop (RFC 6891, 6.1.4) and stay here.
    pub(super) fn outgoing(&self) -> Result<Outgoing, ProtoError> {
        let mut message = Message::query();
        message.metadata.recursion_desired = self.header.recursion_desired;
        message.metadata.authentic_data = self.header.authentic_data;
        message.metadata.checking_disabled = self.header.checking_disabled;
        message.queries.push(self.query.clone());
        message.edns = self.own_edns();
        let name: usize = self.name().iter().map(|label| 1 + label.len()).sum();
        Ok(Outgoing {
            bytes: message.to_vec()?,
            end: HEADER + name + 1 + 2 * size_of::<u16>(),
        })
    }

    /// Returns an answer without records.
    pub(super) fn reply(&self, code: ResponseCode) -> Message {
        let mut message = Message::new(self.header.id, MessageType::Response, OpCode::Query);
        message.metadata = Metadata::response_from_request(&self.header);
        message.metadata.response_code = code;
        message.queries.push(self.query.clone());
        message.edns = self.own_edns();
        message
    }

    /// Returns NXDOMAIN or, for `NoError`, NODATA, with the SOA record that CoreDNS puts there.
    pub(super) fn negative(&self, code: ResponseCode, zone: Zone, domain: &Domain) -> Message {
        let mut message = self.reply(code);
        if let Some(soa) = soa(zone, domain) {
            message.metadata.authoritative = true;
            message.authorities.push(soa);
        }
        message
    }

    /// Returns an answer that tells the client to ask by TCP.
    pub(super) fn truncated(&self) -> Message {
        let mut message = self.reply(ResponseCode::NoError);
        message.metadata.truncation = true;
        message
    }

    /// Turns `answer`, which answers `outgoing`, into an answer to this question.
    pub(super) fn restore(&self, outgoing: &Outgoing, answer: &mut [u8]) {
        let id = self.header.id.to_be_bytes();
        for (at, byte) in answer.iter_mut().zip(id) {
            *at = byte;
        }
        // Some servers lower the case, and a client that mixes it would not believe that.
        let question = HEADER..outgoing.end;
        if let (Some(to), Some(from)) = (answer.get_mut(question.clone()), outgoing.bytes.get(question)) {
            to.copy_from_slice(from);
        }
    }

    fn own_edns(&self) -> Option<Edns> {
        self.edns.map(|client| {
            let mut edns = Edns::new();
            edns.set_max_payload(client.payload)
                .set_dnssec_ok(client.dnssec_ok);
            edns
        })
    }
}

impl Outgoing {
    /// Whether `bytes` answer this query: they have its id and its question, the case of the name aside.
    pub(super) fn is_answered_by(&self, bytes: &[u8]) -> bool {
        let Ok(Header { metadata, counts }) = Header::read(&mut BinDecoder::new(bytes)) else {
            return false;
        };
        let type_and_class = self.end - 2 * size_of::<u16>();
        let part = |of: &[u8], from: usize, to: usize| of.get(from..to).map(<[u8]>::to_vec);
        let names = [bytes, &self.bytes].map(|of| part(of, HEADER, type_and_class));
        let kinds = [bytes, &self.bytes].map(|of| part(of, type_and_class, self.end));
        let same_name = match &names {
            // Lengths of labels are below every letter, so comparing them without case is safe.
            [Some(theirs), Some(own)] => theirs.eq_ignore_ascii_case(own),
            _ => false,
        };
        metadata.message_type == MessageType::Response
            && metadata.op_code == OpCode::Query
            && counts.queries == 1
            && bytes.get(..2) == self.bytes.get(..2)
            && same_name
            && kinds[0] == kinds[1]
    }
}

fn soa(zone: Zone, domain: &Domain) -> Option<Record> {
    let zone = match zone {
        Zone::Cluster => domain.name().clone(),
        Zone::Reverse4 => Name::from_ascii("in-addr.arpa.").ok()?,
        Zone::Reverse6 => Name::from_ascii("ip6.arpa.").ok()?,
        Zone::Outside => return None,
    };
    let primary = Name::from_ascii("ns.dns").ok()?.append_domain(&zone).ok()?;
    let mailbox = Name::from_ascii("hostmaster").ok()?.append_domain(&zone).ok()?;
    let soa = SOA::new(primary, mailbox, 1, 7200, 1800, 86400, NEGATIVE_TTL);
    Some(Record::from_rdata(zone, NEGATIVE_TTL, RData::SOA(soa)))
}
