//! The condition `CertificateReady` of Vips whose profiles name a Secret.

use k8s_openapi::jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use thuban_api::{ConditionStatus, PoolDriver, Vip, VipStatus};

use super::{Context, driver_of, say};
use crate::certificates::Problem;
use crate::driver::treatment_of;

/// The type of the condition.
pub const CERTIFICATE: &str = "CertificateReady";

/// A condition's status, reason and message.
type Said = (ConditionStatus, String, String);

/// Returns what the condition of a Vip says; `None`: the Vip is to have none.
pub fn said(vip: &Vip, context: &Context) -> Option<Said> {
    if driver_of(vip, context) != PoolDriver::Haproxy {
        return None;
    }
    let namespace = vip.namespace().unwrap_or_default();
    let reference = ObjectRef::new(&vip.name_any()).within(&namespace);
    let service = context.services.get(&reference)?;
    let secret = treatment_of(&service)?.ssl?.secret;
    let said = match context.certificates.state(&namespace, &secret) {
        None => (
            ConditionStatus::False,
            Problem::Away.reason().to_owned(),
            format!("Secret {secret} is not read yet"),
        ),
        Some(Ok(())) => (
            ConditionStatus::True,
            "Valid".to_owned(),
            format!("nodes have the certificate of Secret {secret}"),
        ),
        Some(Err(problem)) => (
            ConditionStatus::False,
            problem.reason().to_owned(),
            problem.message(&namespace, &secret),
        ),
    };
    Some(said)
}

/// Whether the Secret is going to be read.
pub fn is_awaited(said: Option<&Said>) -> bool {
    said.is_some_and(|(_, reason, _)| reason == Problem::Away.reason())
}

/// Writes what the condition says. Returns whether it changed.
pub fn tell(vip: &mut Vip, said: Option<Said>, now: Timestamp) -> bool {
    let generation = vip.metadata.generation;
    let status = vip.status.get_or_insert_with(VipStatus::default);
    let before = status.conditions.clone();
    match said {
        Some(said) => say(&mut status.conditions, CERTIFICATE, said, generation, now),
        None => status
            .conditions
            .retain(|condition| condition.kind != CERTIFICATE),
    }
    status.conditions != before
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_secret_that_is_not_read_is_awaited() {
        let said = |reason: &str| (ConditionStatus::False, reason.to_owned(), String::new());
        assert!(is_awaited(Some(&said("NotRead"))));
        assert!(!is_awaited(Some(&said("SecretNotFound"))) && !is_awaited(None));
    }
}
