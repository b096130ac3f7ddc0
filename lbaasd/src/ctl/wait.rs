//! Waits for the end of what was asked for, and tells its progress.

use std::time::Duration;

use kube::{Api, ResourceExt};
use thuban_api::condition::find;
use thuban_api::{ConditionStatus, Vip};
use tokio::time::{Instant, sleep};

use super::CtlError;

const PAUSE: Duration = Duration::from_millis(500);

/// Waits until a Vip is ready for what it says now.
pub async fn until_ready(api: &Api<Vip>, vip: &Vip, limit: Duration) -> Result<(), CtlError> {
    until(api, vip, limit, "ready", |current| match current {
        Some(current) => unready(current),
        None => Some("somebody deleted it".to_owned()),
    })
    .await
}

/// Waits until a deleted Vip is gone.
pub async fn until_gone(api: &Api<Vip>, vip: &Vip, limit: Duration) -> Result<(), CtlError> {
    until(api, vip, limit, "gone", |current| current.map(present)).await
}

/// `why_not`: what is lacking of the Vip; `None` if nothing is.
async fn until(
    api: &Api<Vip>,
    vip: &Vip,
    limit: Duration,
    what: &'static str,
    why_not: impl Fn(Option<&Vip>) -> Option<String>,
) -> Result<(), CtlError> {
    let (name, end) = (vip.name_any(), Instant::now() + limit);
    let mut told = None;
    loop {
        let current = api.get_opt(&name).await?;
        let current = current.filter(|current| current.uid() == vip.uid());
        let Some(why) = why_not(current.as_ref()) else {
            let addresses = current.and_then(|vip| vip.status).map(|status| status.addresses);
            let addresses = addresses.unwrap_or_default().join(" ");
            println!("{}", format!("{what} {addresses}").trim_end());
            return Ok(());
        };
        if told.as_ref() != Some(&why) {
            println!("not {what} yet: {why}");
        }
        if Instant::now() >= end {
            return Err(CtlError::Late {
                vip: name,
                what,
                seconds: limit.as_secs(),
                why,
            });
        }
        told = Some(why);
        sleep(PAUSE).await;
    }
}

/// Returns why a Vip is not ready; `None` if it is.
fn unready(vip: &Vip) -> Option<String> {
    let status = vip
        .status
        .as_ref()
        .filter(|status| status.observed_generation == vip.metadata.generation);
    let Some(ready) = status.and_then(|status| find(&status.conditions, "Ready")) else {
        return Some("lbaasd has not seen the Vip yet: does it run?".to_owned());
    };
    (ready.status != ConditionStatus::True).then(|| format!("{}: {}", ready.reason, ready.message))
}

/// Returns what a deleted Vip waits for.
fn present(vip: &Vip) -> String {
    let status = vip.status.clone().unwrap_or_default();
    let nodes: Vec<&str> = status
        .announcers
        .iter()
        .map(|announcer| announcer.node.as_str())
        .collect();
    if !status.dns_name.is_empty() && status.name_removed_at.is_none() {
        format!("the name {} is in DNS", status.dns_name)
    } else if nodes.is_empty() {
        "its end is under way".to_owned()
    } else {
        format!("nodes have not withdrawn its addresses: {}", nodes.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use thuban_api::Vip;

    use super::{present, unready};

    fn vip(status: &Value) -> Vip {
        serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "metadata": {"name": "shop", "generation": 2},
            "spec": {"service": "web"}, "status": status,
        }))
        .unwrap()
    }

    fn judged(generation: i64, status: &str) -> Value {
        json!({"observedGeneration": generation, "conditions": [{"type": "Ready", "status": status,
            "reason": "NoNode", "message": "Announced: no node", "lastTransitionTime": ""}]})
    }

    #[test]
    fn a_vip_is_ready_once_its_latest_spec_is() {
        assert!(unready(&vip(&Value::Null)).unwrap().contains("has not seen"));
        assert!(
            unready(&vip(&judged(1, "True")))
                .unwrap()
                .contains("has not seen")
        );
        assert_eq!(
            unready(&vip(&judged(2, "False"))).unwrap(),
            "NoNode: Announced: no node"
        );
        assert_eq!(unready(&vip(&judged(2, "True"))), None);
    }

    #[test]
    fn a_deleted_vip_says_what_it_waits_for() {
        let of = |status: Value| present(&vip(&status));
        let announcers = json!([{"node": "node-a", "sequence": 1}]);
        let named = json!({"dnsName": "shop.example.com", "announcers": announcers});
        assert!(of(named).contains("shop.example.com is in DNS"));
        let removed = json!({"dnsName": "shop.example.com", "nameRemovedAt": "", "announcers": announcers});
        assert!(of(removed).contains("node-a"));
        assert_eq!(of(json!({})), "its end is under way");
    }
}
