//! The service `Transit` as the operator serves it: the generated one, but for messages that are bytes already.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use thuban_proto::codec::SmallBuffers;
use thuban_proto::transit::transit_server::SERVICE_NAME;
use thuban_proto::transit::{DropletMessage, OperatorMessage};
use tonic::body::Body;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic::codegen::{self, BoxFuture, StdError, http};
use tonic::server::{Grpc, NamedService, StreamingService};
use tonic::{Request, Response, Status, Streaming};

use super::server::TransitService;
use crate::hub::Outgoing;

/// The only method.
const CONNECT: &str = "/thuban.transit.v1.Transit/Connect";
/// The largest message in bytes: a Hello of a droplet with 10,000 subscriptions fits well.
const LARGEST_MESSAGE: usize = 16 << 20;

/// The messages to a droplet.
pub type Messages = Pin<Box<dyn Stream<Item = Result<Outgoing, Status>> + Send>>;

type Generated = SmallBuffers<OperatorMessage, DropletMessage>;

/// The generated service's codec, but for what it sends.
#[derive(Clone, Copy, Debug, Default)]
struct Packed;

impl Codec for Packed {
    type Encode = Outgoing;
    type Decode = DropletMessage;
    type Encoder = Self;
    type Decoder = <Generated as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        *self
    }

    fn decoder(&mut self) -> Self::Decoder {
        Generated::default().decoder()
    }
}

impl Encoder for Packed {
    type Item = Outgoing;
    type Error = Status;

    fn encode(&mut self, message: Outgoing, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        message
            .encode(buffer)
            .map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        Generated::default().encoder().buffer_settings()
    }
}

/// The service, for tonic's server.
#[derive(Clone)]
pub struct Transit(Arc<TransitService>);

impl Transit {
    pub fn new(service: TransitService) -> Self {
        Self(Arc::new(service))
    }
}

impl NamedService for Transit {
    const NAME: &'static str = SERVICE_NAME;
}

/// The method `Connect`.
struct Connect(Arc<TransitService>);

impl StreamingService<DropletMessage> for Connect {
    type Response = Outgoing;
    type ResponseStream = Messages;
    type Future = BoxFuture<Response<Messages>, Status>;

    fn call(&mut self, request: Request<Streaming<DropletMessage>>) -> Self::Future {
        let service = Arc::clone(&self.0);
        Box::pin(async move { service.connect(request).await })
    }
}

impl<B> codegen::Service<http::Request<B>> for Transit
where
    B: codegen::Body + Send + 'static,
    B::Error: Into<StdError> + Send + 'static,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        if request.uri().path() != CONNECT {
            return Box::pin(async { Ok(Status::unimplemented("no such method").into_http()) });
        }
        let method = Connect(Arc::clone(&self.0));
        Box::pin(async move {
            let mut grpc = Grpc::new(Packed).max_decoding_message_size(LARGEST_MESSAGE);
            Ok(grpc.streaming(method, request).await)
        })
    }
}
