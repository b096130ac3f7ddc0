//! The body of an answer: messages as gRPC frames them, and the stream's status at the end.
//!
//! Invariant: no buffer outlives its message. tonic's own encoder keeps one for each stream that is as large as the
//! stream's largest message, and an operator has a stream for each droplet.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use http_body::{Body, Frame};
use prost::bytes::{BufMut, Bytes, BytesMut};
use tonic::Status;
use tonic::codegen::http::HeaderMap;

use super::service::Messages;
use crate::hub::Outgoing;

/// Bytes before each message: whether it is compressed, and its length.
const PREFIX: usize = 5;

/// The messages to a droplet as the body of an HTTP answer.
pub struct MessageBody {
    messages: Messages,
    /// What is left of the message that is being sent.
    parts: VecDeque<Bytes>,
    is_over: bool,
}

impl MessageBody {
    pub fn new(messages: Messages) -> Self {
        Self {
            messages,
            parts: VecDeque::new(),
            is_over: false,
        }
    }

    /// Ends the stream with a status.
    fn end(&mut self, status: &Status) -> Result<Frame<Bytes>, Status> {
        self.is_over = true;
        let mut trailers = HeaderMap::new();
        status.add_header(&mut trailers)?;
        Ok(Frame::trailers(trailers))
    }
}

/// Returns a message with its prefix, in parts.
fn framed(message: &Outgoing) -> Result<Vec<Bytes>, Status> {
    let length = message.encoded_len();
    let told = u32::try_from(length)
        .map_err(|_| Status::internal(format!("a message of {length} bytes: 4 GiB are the most")))?;
    let mut first = BytesMut::with_capacity(PREFIX + message.own_len());
    first.put_u8(0);
    first.put_u32(told);
    message
        .encode(first)
        .map_err(|error| Status::internal(error.to_string()))
}

impl Body for MessageBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let body = self.get_mut();
        loop {
            if let Some(part) = body.parts.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(part))));
            }
            if body.is_over {
                return Poll::Ready(None);
            }
            let message = ready!(body.messages.as_mut().poll_next(context));
            match message.map(|message| framed(&message?)) {
                Some(Ok(parts)) => body.parts = parts.into(),
                Some(Err(status)) => return Poll::Ready(Some(body.end(&status))),
                None => return Poll::Ready(Some(body.end(&Status::ok("")))),
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.is_over && self.parts.is_empty()
    }
}
