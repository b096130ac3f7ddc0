//! Whose stream it is: the node's, or that of a droplet without a data plane, which is how the operator is measured.

use std::path::Path;

use thuban_proto::transit::{DropletMessage, Hello, Nack, Program, Subscribe, droplet_message::Message};
use tokio::sync::mpsc;

use super::session::attachment;
use crate::node::Node;
use crate::{endpoints, metrics};

/// The stream's outgoing side.
pub type Outbox = mpsc::UnboundedSender<DropletMessage>;

pub trait Peer: Send + Sync {
    /// Read at each attempt.
    fn token_file(&self) -> &Path;

    /// Says what is here in `hello`, sends it, and keeps the outbox for what changes; all under one lock.
    fn open(&self, hello: Hello, outbox: &Outbox);

    /// The outbox leads nowhere any more.
    fn close(&self);

    /// Applies a program; what could not be applied is answered.
    fn apply(&self, program: Program) -> Vec<Nack>;
}

impl Peer for Node {
    fn token_file(&self) -> &Path {
        &self.settings.token_file
    }

    fn open(&self, hello: Hello, outbox: &Outbox) {
        let mut state = self.state();
        let subscribe = |key: &thuban_common::tables::EndpointKey| Subscribe {
            vni: key.vni,
            address: key.address.to_vec(),
        };
        let hello = Hello {
            droplet: self.settings.node_name.clone(),
            attachments: state.attachments.values().map(attachment).collect(),
            subscriptions: state.subscriptions.keys().map(subscribe).collect(),
            ..hello
        };
        // The receiver lives as long as the session.
        let _ = outbox.send(DropletMessage {
            message: Some(Message::Hello(hello)),
        });
        state.outbox = Some(outbox.clone());
    }

    fn close(&self) {
        let mut state = self.state();
        (state.outbox, state.stream) = (None, None);
    }

    fn apply(&self, program: Program) -> Vec<Nack> {
        metrics::receives(&program);
        let is_kept = endpoints::concern(&program);
        let nacks = {
            let mut state = self.state();
            let nacks = state.apply(program);
            if is_kept {
                self.endpoints.keep(state.program.locals());
            }
            nacks
        };
        metrics::refuses(&nacks);
        self.announce();
        nacks
    }
}
