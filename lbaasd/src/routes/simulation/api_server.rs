//! The API server of the schedules: loses requests and answers, and refuses writes of another version.

use std::sync::Arc;

use http::{Method, Request, Response};
use kube::client::Body;
use serde_json::json;
use thuban_api::Vip;

use super::{World, l2};

pub type Fault = Box<dyn std::error::Error + Send + Sync>;

pub fn fault(code: u16, reason: &str) -> Result<Response<Body>, Fault> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": reason, "reason": reason, "code": code});
    let body = Body::from(status.to_string().into_bytes());
    Ok(Response::builder().status(code).body(body)?)
}

impl World {
    /// Returns a new version of an object.
    pub fn version(&self) -> String {
        let mut version = self.version.lock().unwrap();
        *version += 1;
        version.to_string()
    }

    /// Writes the Vip, with a new version.
    pub fn write(&self, vip: Vip) -> Vip {
        let mut vip = vip;
        vip.metadata.resource_version = Some(self.version());
        *self.vip.lock().unwrap() = Some(vip.clone());
        vip
    }

    /// Answers a request as an API server does.
    pub async fn serve(self: Arc<Self>, request: Request<Body>) -> Result<Response<Body>, Fault> {
        self.pause(2).await;
        if self.chance(12) {
            return Err("the request was lost".into());
        }
        let (method, path) = (request.method().clone(), request.uri().path().to_owned());
        let body = request.into_body().collect_bytes().await?;
        let answer = if path.contains("/leases") {
            l2::serve(&self, &method, &path, &body)?
        } else {
            self.serve_vip(method == Method::PUT, &body)?
        };
        self.pause(2).await;
        if self.chance(12) {
            return Err("the answer was lost".into());
        }
        Ok(answer)
    }

    fn serve_vip(&self, is_write: bool, body: &[u8]) -> Result<Response<Body>, Fault> {
        let Some(current) = self.vip.lock().unwrap().clone() else {
            return fault(404, "NotFound");
        };
        let vip = if is_write {
            let written: Vip = serde_json::from_slice(body)?;
            if written.metadata.resource_version != current.metadata.resource_version {
                self.count(|seen| seen.conflicts += 1);
                return fault(409, "Conflict");
            }
            self.write(Vip {
                status: written.status,
                ..current
            })
        } else {
            current
        };
        Ok(Response::new(Body::from(serde_json::to_vec(&vip)?)))
    }
}
