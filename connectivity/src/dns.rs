//! Asks a DNS server for the IPv4 addresses of a name. The program is static, so the resolver of the C library is no
//! choice: it loads modules.

use std::net::SocketAddr;
use std::time::Duration;

use hickory_proto::ProtoError;
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RData, RecordType};

use crate::ask::{AskError, connected};

/// Returns the addresses in order, with commas between them.
pub(crate) fn addresses(server: SocketAddr, name: &str, limit: Duration) -> Result<String, AskError> {
    let mut question = Query::new();
    question
        .set_name(Name::from_ascii(format!("{name}."))?)
        .set_query_type(RecordType::A);
    let mut query = Message::query();
    query.metadata.recursion_desired = true;
    query.add_query(question);
    let socket = connected(server, limit)?;
    socket.send(&query.to_vec()?)?;
    let mut buffer = [0; 4096];
    let length = socket.recv(&mut buffer)?;
    let bytes = buffer.get(..length).unwrap_or_default();
    let answer = Message::from_vec(bytes).map_err(ProtoError::from)?;
    if answer.metadata.id != query.metadata.id {
        return Err(AskError::NoAnswer);
    }
    if answer.metadata.response_code != ResponseCode::NoError {
        return Err(AskError::Refused(answer.metadata.response_code));
    }
    let mut found: Vec<_> = answer
        .answers
        .iter()
        .filter_map(|record| match &record.data {
            RData::A(address) => Some(address.0),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        return Err(AskError::NoAddress);
    }
    found.sort_unstable();
    let found: Vec<String> = found.iter().map(ToString::to_string).collect();
    Ok(found.join(", "))
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
    use std::thread;

    use hickory_proto::op::{Message, MessageType, ResponseCode};
    use hickory_proto::rr::rdata::A;
    use hickory_proto::rr::{RData, Record};

    use super::addresses;

    const NO_NAME: &str = "missing.red.svc.cluster.local";
    const LIMIT: std::time::Duration = std::time::Duration::from_secs(5);

    /// Starts a server that knows every name but one, for so many queries.
    fn server(queries: usize) -> SocketAddr {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = socket.local_addr().unwrap();
        thread::spawn(move || {
            for _ in 0..queries {
                let mut buffer = [0; 512];
                let (length, client) = socket.recv_from(&mut buffer).unwrap();
                let mut message = Message::from_vec(&buffer[..length]).unwrap();
                message.metadata.message_type = MessageType::Response;
                let name = message.queries[0].name().clone();
                if name.to_string() == format!("{NO_NAME}.") {
                    message.metadata.response_code = ResponseCode::NXDomain;
                } else {
                    for last in [9, 7] {
                        let address = A(Ipv4Addr::new(10, 96, 0, last));
                        message
                            .answers
                            .push(Record::from_rdata(name.clone(), 5, RData::A(address)));
                    }
                }
                socket.send_to(&message.to_vec().unwrap(), client).unwrap();
            }
        });
        address
    }

    #[test]
    fn a_name_has_its_addresses_and_a_missing_one_has_none() {
        let server = server(2);
        let found = addresses(server, "server.red.svc.cluster.local", LIMIT).unwrap();
        assert_eq!(found, "10.96.0.7, 10.96.0.9");
        let error = addresses(server, NO_NAME, LIMIT).unwrap_err();
        assert_eq!(error.to_string(), "the DNS server says: Non-Existent Domain");
    }
}
