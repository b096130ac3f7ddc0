//! The body of an answer: messages as gRPC frames them, and the stream's status at the end.
//!
//! Invariant: no buffer outlives its message. tonic's own encoder keeps one for each stream that is as large as the
//! stream's largest message, and an operator has a stream for each droplet.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use http_body::{Body, Frame};
use prost::bytes::{BufMut, Bytes, BytesMut};
use tonic::Status;
use tonic::codegen::http::HeaderMap;

use super::service::Messages;
use crate::hub::Outgoing;

/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;
/// Messages that are ready go out together up to this number of bytes.
const TOGETHER: usize = 32 * 1024;

/// The messages to a droplet as the body of an HTTP answer.
pub struct MessageBody {
    messages: Messages,
    /// What is to be sent next.
    parts: VecDeque<Bytes>,
    /// The status to end with, after these parts.
    end: Option<Status>,
    is_over: bool,
}

impl MessageBody {
    pub fn new(messages: Messages) -> Self {
        Self {
            messages,
            parts: VecDeque::new(),
            end: None,
            is_over: false,
        }
    }

    /// Takes the messages that are ready.
    fn gather(&mut self, context: &mut Context<'_>) {
        let (mut own, mut length) = (BytesMut::new(), 0);
        while self.end.is_none() && length < TOGETHER {
            let Poll::Ready(message) = self.messages.as_mut().poll_next(context) else {
                break;
            };
            let message = message.ok_or_else(|| Status::ok(""));
            let framed = message.flatten().and_then(|message| {
                length += frame(&message, &mut own)?;
                Ok(message)
            });
            match framed {
                Ok(message) if message.shared().next().is_some() => {
                    self.parts.push_back(own.split().freeze());
                    self.parts.extend(message.shared().cloned());
                }
                Ok(_) => {}
                Err(status) => self.end = Some(status),
            }
        }
        if !own.is_empty() {
            self.parts.push_back(own.freeze());
        }
    }
}

/// Writes a message with its prefix, but for the bytes that other streams have, too: they come last. Returns the length
/// with them.
fn frame(message: &Outgoing, own: &mut BytesMut) -> Result<usize, Status> {
    let length = message.encoded_len();
    let told = u32::try_from(length)
        .map_err(|_| Status::internal(format!("a message of {length} bytes: 4 GiB are the most")))?;
    let shared: usize = message.shared().map(Bytes::len).sum();
    own.reserve(PREFIX + length - shared);
    own.put_u8(0);
    own.put_u32(told);
    message
        .encode_own(own)
        .map_err(|error| Status::internal(error.to_string()))?;
    Ok(PREFIX + length)
}

impl Body for MessageBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let body = self.get_mut();
        if body.is_over {
            return Poll::Ready(None);
        }
        if body.parts.is_empty() {
            body.gather(context);
        }
        if let Some(part) = body.parts.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(part))));
        }
        let Some(status) = body.end.take() else {
            return Poll::Pending;
        };
        body.is_over = true;
        let mut trailers = HeaderMap::new();
        Poll::Ready(Some(
            status
                .add_header(&mut trailers)
                .map(|()| Frame::trailers(trailers)),
        ))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use futures::stream;
    use http_body_util::BodyExt as _;
    use prost::Message as _;
    use prost::bytes::Buf as _;
    use thuban_proto::transit::OperatorMessage;
    use tonic::Code;

    use super::*;
    use crate::hub::PackedProgram;
    use crate::model::world::{Delta, World};

    /// Returns the parts of a body and the code in its trailers.
    async fn read(messages: Vec<Result<Outgoing, Status>>) -> (Vec<Bytes>, Code) {
        let mut body = MessageBody::new(Box::pin(stream::iter(messages)));
        let (mut parts, mut code) = (Vec::new(), None);
        while let Some(frame) = body.frame().await {
            match frame.unwrap().into_data() {
                Ok(part) => parts.push(part),
                Err(end) => code = Some(end.into_trailers().unwrap()["grpc-status"].clone()),
            }
        }
        (parts, Code::from_bytes(code.unwrap().as_bytes()))
    }

    fn snapshot(world: &mut World, droplet: &str) -> Outgoing {
        PackedProgram::snapshot(1, 1, world.snapshot(droplet)).into()
    }

    #[tokio::test]
    async fn messages_arrive_in_order_and_snapshots_share_bytes() {
        let mut world = World::default();
        for last in 0..200 {
            world.set_droplet(&format!("d{last}"), Some(Ipv4Addr::new(172, 16, 0, last)));
        }
        world.flush();
        let changes = |sequence| Outgoing::from(PackedProgram::changes(1, sequence, Delta::new()));
        let sent = [snapshot(&mut world, "d100"), changes(2), changes(3)];
        let (parts, code) = read(sent.iter().cloned().map(Ok).collect()).await;
        assert_eq!(code, Code::Ok);
        assert_eq!(
            parts.len(),
            4,
            "the snapshot's own, those of others twice, the changes"
        );
        let mut bytes = Bytes::from(parts.concat());
        for message in sent {
            assert_eq!(bytes.get_u8(), 0);
            let length = bytes.get_u32() as usize;
            let read = OperatorMessage::decode(bytes.split_to(length)).unwrap();
            assert_eq!(read, message.unpack());
        }
        assert!(bytes.is_empty());
        let (others, _) = read(vec![Ok(snapshot(&mut world, "d100"))]).await;
        assert_eq!(others[1].as_ptr(), parts[1].as_ptr(), "no stream has a copy");
    }

    #[tokio::test]
    async fn a_stream_ends_with_its_status_after_its_messages() {
        let last = Outgoing::from(PackedProgram::changes(1, 2, Delta::new()));
        let (parts, code) = read(vec![Ok(last), Err(Status::aborted("dial again"))]).await;
        assert_eq!((parts.len(), code), (1, Code::Aborted));
    }
}
