use std::sync::{Arc, Mutex};

use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use thuban_api::Vip;

use super::change_status;

/// An API server with one Vip, which notes the methods of requests.
#[derive(Clone)]
struct Server {
    vip: Arc<Mutex<Option<Vip>>>,
    methods: Arc<Mutex<Vec<Method>>>,
}

impl Server {
    fn new(vip: Option<Vip>) -> Self {
        Self {
            vip: Arc::new(Mutex::new(vip)),
            methods: Arc::default(),
        }
    }

    fn client(&self) -> Client {
        let server = self.clone();
        let service = tower::service_fn(move |request| server.clone().serve(request));
        Client::new(service, "default")
    }

    async fn serve(
        self,
        request: Request<Body>,
    ) -> Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>> {
        let method = request.method().clone();
        let body = request.into_body().collect_bytes().await?;
        self.methods.lock().unwrap().push(method.clone());
        let mut vip = self.vip.lock().unwrap();
        let Some(current) = &*vip else {
            return refuse(404);
        };
        let mut answer = current.clone();
        if method == Method::PUT {
            let written: Vip = serde_json::from_slice(&body)?;
            if written.metadata.resource_version != current.metadata.resource_version {
                return refuse(409);
            }
            answer.status = written.status;
            answer.metadata.resource_version = Some("100".to_owned());
            *vip = Some(answer.clone());
        }
        Ok(Response::new(Body::from(serde_json::to_vec(&answer)?)))
    }

    /// Notes a pool in the status of a Vip that the caller knows like this.
    async fn note(&self, known: &Vip) -> Option<Vip> {
        change_status(&self.client(), known, |vip| {
            let status = vip.status.get_or_insert_default();
            let is_new = status.pool != "public";
            status.pool = "public".to_owned();
            is_new
        })
        .await
        .unwrap()
    }

    fn methods(&self) -> Vec<Method> {
        self.methods.lock().unwrap().clone()
    }
}

fn refuse(code: u16) -> Result<Response<Body>, Box<dyn std::error::Error + Send + Sync>> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "",
        "reason": "", "code": code});
    let body = Body::from(status.to_string().into_bytes());
    Ok(Response::builder().status(code).body(body)?)
}

fn vip(uid: &str, version: &Value, status: &Value) -> Vip {
    let metadata = json!({"name": "web", "namespace": "red", "uid": uid, "resourceVersion": version});
    serde_json::from_value(
        json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "metadata": metadata,
        "spec": {"service": "web"}, "status": status}),
    )
    .unwrap()
}

fn plain(uid: &str, version: &str) -> Vip {
    vip(uid, &json!(version), &Value::Null)
}

#[tokio::test]
async fn the_latest_object_is_written_without_a_look() {
    let server = Server::new(Some(plain("v1", "7")));
    let written = server.note(&plain("v1", "7")).await.unwrap();
    assert_eq!(written.metadata.resource_version.as_deref(), Some("100"));
    assert_eq!(server.methods(), [Method::PUT]);
}

#[tokio::test]
async fn an_object_that_others_wrote_is_read_again() {
    let server = Server::new(Some(plain("v1", "8")));
    let written = server.note(&plain("v1", "7")).await.unwrap();
    assert_eq!(written.status.unwrap().pool, "public");
    assert_eq!(server.methods(), [Method::PUT, Method::GET, Method::PUT]);
}

#[tokio::test]
async fn only_the_api_server_says_that_nothing_changes() {
    let noted = vip("v1", &json!("7"), &json!({"pool": "public"}));
    let server = Server::new(Some(plain("v1", "8")));
    server.note(&noted).await.unwrap();
    assert_eq!(server.methods(), [Method::GET, Method::PUT]);
}

#[tokio::test]
async fn an_object_of_unknown_version_is_read_first() {
    let server = Server::new(Some(plain("v1", "8")));
    server.note(&vip("v1", &Value::Null, &Value::Null)).await.unwrap();
    assert_eq!(server.methods(), [Method::GET, Method::PUT]);
}

#[tokio::test]
async fn another_object_of_the_name_is_left_alone() {
    let server = Server::new(Some(plain("v2", "8")));
    assert!(server.note(&plain("v1", "7")).await.is_none());
    assert_eq!(server.methods(), [Method::PUT, Method::GET]);
    let gone = Server::new(None);
    assert!(gone.note(&plain("v1", "7")).await.is_none());
    assert_eq!(gone.methods(), [Method::PUT]);
}
