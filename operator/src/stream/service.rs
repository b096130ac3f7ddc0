//! The service `Transit` as the operator serves it: the generated one, but for answers that are bytes already.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;
use thuban_proto::codec::SmallBuffers;
use thuban_proto::transit::transit_server::SERVICE_NAME;
use thuban_proto::transit::{DropletMessage, OperatorMessage};
use tonic::body::Body;
use tonic::codec::Codec;
use tonic::codegen::{self, BoxFuture, StdError, http};
use tonic::metadata::GRPC_CONTENT_TYPE;
use tonic::server::NamedService;
use tonic::{Request, Response, Status, Streaming};

use super::body::MessageBody;
use super::server::TransitService;
use crate::hub::Outgoing;

/// The only method.
const CONNECT: &str = "/thuban.transit.v1.Transit/Connect";
/// The largest message in bytes: a Hello of a droplet with 10,000 subscriptions fits well.
const LARGEST_MESSAGE: usize = 16 << 20;

/// The messages to a droplet.
pub type Messages = Pin<Box<dyn Stream<Item = Result<Outgoing, Status>> + Send>>;

/// The generated service's codec.
type Generated = SmallBuffers<OperatorMessage, DropletMessage>;

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
        let service = Arc::clone(&self.0);
        Box::pin(async move {
            let request = Request::from_http(request).map(|body| {
                Streaming::new_request(Generated::default().decoder(), body, None, Some(LARGEST_MESSAGE))
            });
            Ok(match service.connect(request).await {
                Ok(messages) => answer(messages),
                Err(status) => status.into_http(),
            })
        })
    }
}

fn answer(messages: Response<Messages>) -> http::Response<Body> {
    let (metadata, messages, extensions) = messages.into_parts();
    let mut answer = http::Response::new(Body::new(MessageBody::new(messages)));
    *answer.version_mut() = http::Version::HTTP_2;
    *answer.headers_mut() = metadata.into_headers();
    answer
        .headers_mut()
        .insert(http::header::CONTENT_TYPE, GRPC_CONTENT_TYPE);
    *answer.extensions_mut() = extensions;
    answer
}
