//! Whole runs against a played API server, on which VPCs, pods and their answers are there at once.

use std::collections::BTreeMap;
use std::future::ready;
use std::sync::{Arc, Mutex};

use kube::Client;
use serde_json::{Value, json};
use thuban_client::played::{self, Method};
use thuban_connectivity::{Answer, Outcome, Question, Request as Asked};

use super::testing::{SERVICES, facts, plan};
use super::{Report, State, test_plan};
use crate::arguments::TestOptions;
use crate::report::Verdict;

/// What is wrong in the played cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// Pods of the other VPC answer.
    Leak,
    /// The server `web-1` does not start.
    Stuck,
    /// Clients may not be made.
    Forbidden,
    /// The log of clients has only the first answer.
    CutOff,
}

/// Objects by the paths of their collections and names.
type Objects = BTreeMap<String, Value>;

#[derive(Clone)]
struct Server {
    fault: Fault,
    objects: Arc<Mutex<Objects>>,
}

impl Server {
    fn new(fault: Fault) -> Self {
        Self {
            fault,
            objects: Arc::default(),
        }
    }

    fn client(&self) -> Client {
        let server = self.clone();
        played::client(move |request| ready(server.serve(&request)))
    }

    fn paths(&self) -> Vec<String> {
        self.objects.lock().unwrap().keys().cloned().collect()
    }

    fn serve(&self, request: &played::Request) -> played::Answer {
        let path = request.path.as_str();
        let objects = &mut *self.objects.lock().unwrap();
        if let Some(pod) = path.strip_suffix("/log") {
            return (200, self.log(pod, objects));
        }
        if request.method == Method::POST {
            return self.create(path, serde_json::from_slice(&request.body).unwrap(), objects);
        }
        if request.method == Method::DELETE {
            let name = path.rsplit('/').next().unwrap_or_default().to_owned();
            let is_within = |other: &str| other == path || other.contains(&format!("/namespaces/{name}/"));
            objects.retain(|other, _| !is_within(other) && !other.starts_with(&format!("{path}/")));
            return status(200, "Success");
        }
        if let Some(object) = objects.get(path) {
            return answer(object);
        }
        // Names of collections are plurals; no object that the test asks for by name ends so.
        if !path.ends_with('s') {
            return status(404, "NotFound");
        }
        let items: Vec<&Value> = objects
            .iter()
            .filter(|(other, _)| other.rsplit_once('/').is_some_and(|(folder, _)| folder == path))
            .map(|(_, object)| object)
            .collect();
        answer(&json!({"kind": "List", "apiVersion": "v1", "metadata": {}, "items": items}))
    }

    /// Makes an object, and lets the cluster do its part at once.
    fn create(&self, folder: &str, mut object: Value, objects: &mut Objects) -> played::Answer {
        let name = object["metadata"]["name"].as_str().unwrap().to_owned();
        let path = format!("{folder}/{name}");
        if objects.contains_key(&path) {
            return status(409, "AlreadyExists");
        }
        let namespace = object["metadata"]["namespace"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        object["metadata"]["uid"] = json!("u");
        let kind = object["kind"].as_str().unwrap().to_owned();
        match kind.as_str() {
            "Vpc" | "Network" => object["status"] = json!({"phase": "Provisioned"}),
            "Namespace" => {
                let account = json!({"metadata": {"name": "default", "namespace": name}});
                objects.insert(
                    format!("/api/v1/namespaces/{name}/serviceaccounts/default"),
                    account,
                );
            }
            "Service" => {
                let place = usize::from(namespace == "test-b");
                object["spec"]["clusterIP"] = json!(SERVICES[place]);
            }
            "NetworkPolicy" => {
                let condition = json!({"type": "Provisioned", "status": "True", "reason": "Provisioned",
                    "message": "", "lastTransitionTime": ""});
                let state = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "PolicyState",
                    "metadata": {"name": name, "namespace": namespace}, "spec": {},
                    "status": {"conditions": [condition]}});
                objects.insert(
                    format!("/apis/thuban.dev/v1alpha1/namespaces/{namespace}/policystates/{name}"),
                    state,
                );
            }
            "Pod" if name == "client" && self.fault == Fault::Forbidden => return status(403, "Forbidden"),
            "Pod" if name == "client" => object["status"] = json!({"phase": "Succeeded"}),
            "Pod" if name == "web-1" && self.fault == Fault::Stuck => {
                object["status"] = json!({"phase": "Pending"});
                let event = json!({"metadata": {}, "involvedObject": {"name": name}, "type": "Warning",
                    "reason": "FailedCreatePodSandBox", "message": "the node is on fire"});
                objects.insert(format!("/api/v1/namespaces/{namespace}/events/e"), event);
            }
            "Pod" => {
                object["status"] =
                    json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
            }
            _ => {}
        }
        let made = answer(&object);
        objects.insert(path, object);
        made
    }

    /// Returns the answers of a client, as its network gives them.
    fn log(&self, pod: &str, objects: &Objects) -> String {
        let Some(client) = objects.get(pod) else {
            return String::new();
        };
        let namespace = client["metadata"]["namespace"].as_str().unwrap();
        let questions = client["spec"]["containers"][0]["env"][0]["value"]
            .as_str()
            .unwrap();
        let questions: Vec<Question> = serde_json::from_str(questions).unwrap();
        let lines = questions.iter().map(|question| {
            let outcome = match self.answer(namespace, &question.request, objects) {
                Some(name) => Outcome::Answered(name),
                None => Outcome::Failed("no answer in time".to_owned()),
            };
            let answer = Answer {
                id: question.id,
                outcome,
            };
            serde_json::to_string(&answer).unwrap()
        });
        let count = if self.fault == Fault::CutOff {
            1
        } else {
            questions.len()
        };
        let mut lines: Vec<String> = lines.take(count).collect();
        lines.push("{\"id\": 0, \"outc".to_owned());
        lines.join("\n")
    }

    fn answer(&self, namespace: &str, asked: &Asked, objects: &Objects) -> Option<String> {
        let own = SERVICES[usize::from(namespace == "test-b")];
        match asked {
            Asked::Tcp(server) | Asked::Udp(server) if server.ip() == own => {
                Some(format!("{namespace}/web-0"))
            }
            Asked::Tcp(server) | Asked::Udp(server) => {
                let address = json!(server.ip());
                let mut pods = objects.values().filter(|object| {
                    let is_near = object["metadata"]["namespace"] == namespace || self.fault == Fault::Leak;
                    is_near && object["metadata"]["annotations"]["thuban.dev/ip"] == address
                });
                let pod = pods.next()?;
                let name = pod["metadata"]["name"].as_str().unwrap();
                let is_denied = name == "guarded" && server.port() != 8080;
                let namespace = pod["metadata"]["namespace"].as_str().unwrap();
                (!is_denied).then(|| format!("{namespace}/{name}"))
            }
            Asked::Connect(server) => (server.port() == 443).then(String::new),
            Asked::Dns { name, .. } => name
                .starts_with(&format!("server.{namespace}.svc."))
                .then(|| own.to_string()),
        }
    }
}

fn answer(object: &Value) -> played::Answer {
    (200, object.to_string())
}

fn status(code: u16, reason: &str) -> played::Answer {
    played::status(code, reason, &format!("the server says {reason}"))
}

fn options() -> TestOptions {
    TestOptions {
        timeout: 60,
        image: None,
        nodes: Vec::new(),
        namespace_prefix: "test".to_owned(),
        cidr: "10.213.0.0/16".parse().unwrap(),
        keep: false,
    }
}

/// Runs the test. Returns also how many findings were shown.
async fn run(server: &Server, options: &TestOptions) -> (Report, usize) {
    let mut shown = 0;
    let mut show = |_: &super::Finding| shown += 1;
    let report = Box::pin(test_plan(&server.client(), &plan(), &facts(), options, &mut show)).await;
    (report, shown)
}

#[tokio::test(start_paused = true)]
async fn a_healthy_cluster_passes_and_nothing_is_left() {
    let server = Server::new(Fault::None);
    let (report, shown) = run(&server, &options()).await;
    assert_eq!(report.verdict, Verdict::Good, "{report:#?}");
    assert_eq!(report.count(State::Ok), report.checks.len());
    assert!(report.checks.len() > 40, "{}", report.checks.len());
    assert_eq!(shown, report.checks.len());
    assert_eq!(report.remedy, "");
    assert_eq!(server.paths(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_leak_is_found() {
    let server = Server::new(Fault::Leak);
    let (report, _) = run(&server, &options()).await;
    assert_eq!(report.verdict, Verdict::Found);
    let mut leaks = report
        .checks
        .iter()
        .filter(|finding| finding.message.starts_with("LEAK"));
    assert!(leaks.any(|finding| finding.group == "isolation"), "{report:#?}");
    assert!(report.remedy.contains("kubectl thuban why test-a/web-0"));
    assert_eq!(server.paths(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_pod_that_does_not_start_is_explained() {
    let server = Server::new(Fault::Stuck);
    let (report, shown) = run(&server, &options()).await;
    assert_eq!((report.verdict, shown), (Verdict::Unseen, 0));
    let error = report.error.unwrap();
    for words in [
        "after 60 s",
        "test-a/web-1",
        "FailedCreatePodSandBox: the node is on fire",
    ] {
        assert!(error.contains(words), "{error}");
    }
    assert_eq!(server.paths(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn what_was_made_before_a_failure_is_deleted() {
    for (fault, words) in [
        (Fault::Forbidden, "the server says Forbidden"),
        (Fault::CutOff, "client"),
    ] {
        let server = Server::new(fault);
        let (report, _) = run(&server, &options()).await;
        assert_eq!(report.verdict, Verdict::Unseen, "{report:#?}");
        let error = report.error.unwrap();
        assert!(error.contains(words), "{error}");
        assert_eq!(server.paths(), Vec::<String>::new());
    }
}

#[tokio::test(start_paused = true)]
async fn objects_of_others_are_not_deleted() {
    let server = Server::new(Fault::None);
    let path = "/api/v1/namespaces/test-b".to_owned();
    let other = json!({"metadata": {"name": "test-b", "labels": {"thuban.dev/connectivity-run": "run-0"}}});
    server.objects.lock().unwrap().insert(path.clone(), other);
    let (report, _) = run(&server, &options()).await;
    assert_eq!(report.verdict, Verdict::Unseen);
    let error = report.error.unwrap();
    assert!(error.contains("--namespace-prefix"), "{error}");
    assert_eq!(server.paths(), [path]);
}

#[tokio::test(start_paused = true)]
async fn a_test_that_is_kept_deletes_nothing() {
    let server = Server::new(Fault::None);
    let options = TestOptions {
        keep: true,
        ..options()
    };
    let (report, _) = run(&server, &options).await;
    assert_eq!(report.verdict, Verdict::Good);
    let paths = server.paths();
    for path in [
        "/api/v1/namespaces/test-a/pods/web-0",
        "/apis/thuban.dev/v1alpha1/vpcs/test-b",
    ] {
        assert!(paths.iter().any(|made| made == path), "{paths:?}");
    }
}
