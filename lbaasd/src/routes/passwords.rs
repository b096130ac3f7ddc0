//! Tells users which passwords of BgpPeers nodes do not have.

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::routes::{PASSWORD_NAMESPACE, PasswordProblem, Report, WithoutPassword};

use super::{Speakers, selects};

impl Speakers {
    /// Tells which passwords a node does not have, by events of the BgpPeers.
    pub(super) async fn warn(&self, node: &str, report: &Report) {
        let Some(node) = self.nodes.get(&ObjectRef::new(node)) else {
            return;
        };
        for WithoutPassword { peer, problem } in &report.without_password {
            let Some(peer) = self.peers.get(&ObjectRef::new(peer)) else {
                continue;
            };
            if let Some(secret) = &peer.spec.password_secret
                && selects(&peer, node.labels())
            {
                let (reason, note) = without_password(*problem, secret);
                self.warnings.tell(&*peer, reason, &note).await;
            }
        }
    }
}

/// Returns the reason and the note of an event.
pub(super) fn without_password(problem: PasswordProblem, secret: &str) -> (&'static str, String) {
    let place = format!("spec.passwordSecret: Secret {secret} in namespace {PASSWORD_NAMESPACE}");
    match problem {
        PasswordProblem::NotFound => (
            "PasswordNotFound",
            format!(
                "{place} does not exist: create it with the key password; nodes set up no session before"
            ),
        ),
        PasswordProblem::Invalid => (
            "PasswordInvalid",
            format!(
                "{place} must be of type Opaque or kubernetes.io/basic-auth, and its key password must have 1 to 80 \
                 bytes without line breaks; nodes set up no session before"
            ),
        ),
        PasswordProblem::Unreadable => (
            "PasswordUnreadable",
            format!(
                "{place} can't be read by a node: see the log of thuban-speaker, and apply \
                 install/load-balancers/30-lbaasd.yaml, which gives the right"
            ),
        ),
    }
}
