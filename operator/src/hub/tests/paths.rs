//! Tests of paths that are judged by what droplets have acked.

use thuban_api::PathVerdict;
use thuban_proto::transit::{NackReason, ProbeAnswer, Probed, operator_message};
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

#[tokio::test(start_paused = true)]
async fn a_probe_is_sent_by_the_pods_droplet_and_ends() {
    let (hub, mut droplets) = play(&Kinds::all());
    ack_all(&hub, &mut droplets);
    let plan = hub.plan_probe(&Question {
        source: pod("web"),
        target: Target::Pod(pod("db")),
        protocol: 6,
        port: Some(5432),
    });
    let plan = plan.unwrap();
    assert_eq!(plan.home(), "c");
    let heard = hub.probe(&plan).await.unwrap();
    assert!(heard.unable.contains("c") && heard.answer.is_none(), "{heard:?}");
    for droplet in ["a", "c"] {
        hub.note_can_probe(droplet, true);
    }
    let stream = &mut droplets.get_mut("c").unwrap().stream;
    let report = async {
        let probe = loop {
            let message = stream.recv().await.unwrap().unpack().message;
            if let Some(operator_message::Message::Probe(probe)) = message {
                break probe;
            }
        };
        assert!(probe.send && probe.source_port >= 61_000, "{probe:?}");
        let told = |answer: ProbeAnswer| Probed {
            id: probe.id,
            answer: answer.into(),
            ..Probed::default()
        };
        // Who was not asked is not heard, and others only once.
        hub.note_probed("b", told(ProbeAnswer::Silent));
        hub.note_probed("c", told(ProbeAnswer::Refused));
        hub.note_probed("c", told(ProbeAnswer::Answered));
    };
    // The droplet `a` never reports.
    let (heard, ()) = tokio::join!(hub.probe(&plan), report);
    let heard = heard.unwrap();
    assert_eq!(heard.answer, Some(ProbeAnswer::Refused), "{heard:?}");
    assert_eq!(heard.sightings.keys().collect::<Vec<_>>(), ["c"]);
    assert!(hub.has_room_for_probe("red"));
    let (more, too_many) = tokio::join!(hub.probe(&plan), hub.probe(&plan));
    assert!(
        more.is_some() && too_many.is_none(),
        "the droplet `a` still watches for the first one's packet"
    );
    let at_once = tokio::join!(hub.probe(&plan), hub.probe(&plan), hub.probe(&plan));
    let (silent, also, too_many) = at_once;
    assert_eq!(silent.unwrap().answer, None, "a probe ends without a report");
    assert!(
        also.is_some() && too_many.is_none(),
        "a namespace has two at a time"
    );
    assert!(hub.probe(&plan).await.is_some());
}
