//! Tests of paths that are judged by what droplets have acked.

use thuban_api::PathVerdict;
use thuban_proto::transit::NackReason;
use thuban_rows::{Kind, Kinds, Row};

use super::policy::{ack_all, play, set};
use crate::model::world::path::{AskedPod, PodState, Question, Target};

/// Returns the pod of an endpoint of [`play`].
fn pod(endpoint: &str) -> AskedPod {
    AskedPod {
        namespace: "red".to_owned(),
        name: "web".to_owned(),
        state: PodState::Bound {
            endpoint: ("red".to_owned(), endpoint.to_owned()),
            told: None,
        },
    }
}

#[tokio::test(start_paused = true)]
async fn a_set_without_room_denies_what_was_accepted() {
    let (hub, mut droplets) = play(&Kinds::all());
    set(&hub);
    let (rows, _) = ack_all(&hub, &mut droplets);
    let question = Question {
        source: pod("web"),
        target: Target::Pod(pod("db")),
        protocol: 6,
        port: Some(5432),
    };
    let judgement = hub.judge_path(&question);
    assert_eq!(judgement.verdict, PathVerdict::Ok, "{judgement:#?}");
    let mut keys = rows.iter().map(Row::key);
    let key = keys.find(|key| key.kind() == Kind::PolicySet).unwrap();
    let receiver = &droplets["a"];
    hub.nack("a", receiver.id, receiver.sequence, &key, NackReason::TableFull);
    let judgement = hub.judge_path(&question);
    assert_eq!(judgement.verdict, PathVerdict::No, "{judgement:#?}");
    assert_eq!(judgement.reason.as_deref(), Some("TableFull"), "{judgement:#?}");
}
