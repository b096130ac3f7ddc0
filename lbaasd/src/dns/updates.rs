//! Records at a server that takes dynamic updates (RFC 2136), signed by TSIG (RFC 8945).
//!
//! The owner of a name stands in a TXT record at `_thuban.<name>`. Each update names what must be there: the owner's
//! TXT record, or nothing at both names. The server compares and writes in one step (RFC 2136, section 3.7).

use std::net::{IpAddr, SocketAddr};
use std::time::{SystemTime, UNIX_EPOCH};

use futures::future::BoxFuture;
use hickory_proto::op::{Message, OpCode, Query, ResponseCode, UpdateMessage};
use hickory_proto::rr::rdata::TXT;
use hickory_proto::rr::rdata::tsig::{TsigAlgorithm, TsigError};
use hickory_proto::rr::{DNSClass, Name, RData, Record as DnsRecord, RecordType, TSigner};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::{DnsError, Record, Records, TIMEOUT};

/// By how many seconds the server's clock may differ from this one: the value that RFC 8945 recommends.
pub const FUDGE: u16 = 300;
/// The label of the TXT record that says whose a name is. No name of a Vip has an underscore.
const OWNER_LABEL: &str = "_thuban";

/// A TSIG key.
#[derive(Clone)]
pub struct Key {
    pub name: String,
    pub algorithm: TsigAlgorithm,
    pub secret: Vec<u8>,
}

pub struct Updates {
    server: SocketAddr,
    zone: Name,
    signer: TSigner,
    clock: fn() -> SystemTime,
}

impl Updates {
    /// `zone`: its name without a dot at its end.
    pub fn new(
        server: SocketAddr,
        zone: &str,
        key: Key,
        clock: fn() -> SystemTime,
    ) -> Result<Self, DnsError> {
        Ok(Self {
            server,
            zone: absolute(zone)?,
            signer: TSigner::new(key.secret, key.algorithm, absolute(&key.name)?, FUDGE)?,
            clock,
        })
    }

    /// Sends an update. Returns false if what must be there is not.
    async fn update(&self, required: Vec<DnsRecord>, changes: Vec<DnsRecord>) -> Result<bool, DnsError> {
        let mut zone = Query::new();
        zone.set_name(self.zone.clone()).set_query_type(RecordType::SOA);
        let mut message = Message::query();
        message.metadata.op_code = OpCode::Update;
        message.metadata.recursion_desired = false;
        message.add_zone(zone);
        message.add_pre_requisites(required);
        message.add_updates(changes);
        match timeout(TIMEOUT, self.exchange(message)).await {
            Ok(answered) => judge(answered?),
            Err(_) => Err(DnsError::Late),
        }
    }

    /// Returns the code of a verified answer.
    async fn exchange(&self, mut message: Message) -> Result<ResponseCode, DnsError> {
        let now = (self.clock)().duration_since(UNIX_EPOCH).unwrap_or_default();
        let verifier = message.finalize(&self.signer, now.as_secs())?;
        let bytes = message.to_vec()?;
        let mut connection = TcpStream::connect(self.server).await?;
        // Length and message go out together: servers may read the first segment only.
        let length = (bytes.len() as u16).to_be_bytes();
        connection.write_all(&[&length[..], &bytes].concat()).await?;
        let length = connection.read_u16().await?;
        let mut answer = vec![0; length.into()];
        connection.read_exact(&mut answer).await?;
        let parsed = Message::from_vec(&answer).map_err(hickory_proto::ProtoError::from)?;
        // A server that does not accept a signature can't sign its answer.
        match parsed
            .signature()
            .and_then(|signature| signature.data.error.as_ref())
        {
            Some(TsigError::BadTime) => return Err(DnsError::ClockDiffers),
            Some(_) => return Err(DnsError::KeyRefused),
            None => {}
        }
        if let Some(mut verifier) = verifier {
            verifier.verify(&answer)?;
        }
        Ok(parsed.metadata.response_code)
    }

    async fn replace(
        &self,
        required: Vec<DnsRecord>,
        owner: &str,
        record: &Record,
    ) -> Result<bool, DnsError> {
        let name = absolute(&record.name)?;
        let ttl = record.ttl_seconds;
        let address = |address: &IpAddr| {
            let data = match address {
                IpAddr::V4(address) => RData::A((*address).into()),
                IpAddr::V6(address) => RData::AAAA((*address).into()),
            };
            DnsRecord::from_rdata(name.clone(), ttl, data)
        };
        let mut changes = without_addresses(&name);
        changes.extend(record.addresses.iter().map(address));
        changes.push(owner_record(&record.name, owner, ttl)?);
        self.update(required, changes).await
    }
}

impl Records for Updates {
    fn refresh<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(async move {
            let required = vec![owner_record(&record.name, owner, 0)?];
            self.replace(required, owner, record).await
        })
    }

    fn claim<'a>(&'a self, owner: &'a str, record: &'a Record) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(async move {
            let names = [absolute(&record.name)?, owner_name(&record.name)?];
            let unused = names.map(|name| empty(name, DNSClass::NONE, RecordType::ANY));
            self.replace(unused.into(), owner, record).await
        })
    }

    fn withdraw<'a>(&'a self, owner: &'a str, name: &'a str) -> BoxFuture<'a, Result<bool, DnsError>> {
        Box::pin(async move {
            let mut changes = without_addresses(&absolute(name)?);
            changes.push(empty(owner_name(name)?, DNSClass::ANY, RecordType::TXT));
            self.update(vec![owner_record(name, owner, 0)?], changes).await
        })
    }

    /// An update that changes nothing: an answer about the zone's SOA would not show that the key may write.
    fn check(&self) -> BoxFuture<'_, Result<(), DnsError>> {
        Box::pin(async { self.update(Vec::new(), Vec::new()).await.map(drop) })
    }
}

/// Tells a requirement that is not met from a failure.
fn judge(code: ResponseCode) -> Result<bool, DnsError> {
    match code {
        ResponseCode::NoError => Ok(true),
        ResponseCode::NXDomain | ResponseCode::NXRRSet | ResponseCode::YXDomain | ResponseCode::YXRRSet => {
            Ok(false)
        }
        code => Err(DnsError::Refused(code)),
    }
}

fn absolute(name: &str) -> Result<Name, DnsError> {
    let mut name = Name::from_ascii(name)?;
    name.set_fqdn(true);
    Ok(name)
}

fn owner_name(name: &str) -> Result<Name, DnsError> {
    absolute(&format!("{OWNER_LABEL}.{name}"))
}

fn owner_record(name: &str, owner: &str, ttl: u32) -> Result<DnsRecord, DnsError> {
    let text = TXT::new(vec![format!("heritage=thuban,vip={owner}")]);
    Ok(DnsRecord::from_rdata(owner_name(name)?, ttl, RData::TXT(text)))
}

/// Returns a record without data: its class and type say what is required or removed (RFC 2136, sections 2.4 and 2.5).
fn empty(name: Name, class: DNSClass, kind: RecordType) -> DnsRecord {
    let mut record = DnsRecord::update0(name, 0, kind);
    record.dns_class = class;
    record
}

fn without_addresses(name: &Name) -> Vec<DnsRecord> {
    let removal = |kind| empty(name.clone(), DNSClass::ANY, kind);
    [RecordType::A, RecordType::AAAA].map(removal).into()
}
