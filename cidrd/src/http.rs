//! The HTTP API: who has which address. Its only client is lbaasd, which TLS has verified.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::JsonRejection;
use axum::extract::{DefaultBodyLimit, Path, Request as HttpRequest, State};
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde::{Deserialize, Serialize};
use thuban_api::ip_lease::{IpLease, LeaseHolder, LeaseState};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use crate::lease::{Family, Request, assign, release, renew, renew_held};
use crate::metrics;
use crate::pools::Pools;
use crate::problem::Problem;
use crate::store::Store;

/// Bytes of the largest body of a request.
const LARGEST_BODY: usize = 16 << 10;
/// How long a request may take. What it has done by then stays as it is: a repeat goes on from there.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How many requests are worked on at once.
const AT_ONCE: usize = 64;

/// One address in somebody's hands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Lease {
    /// The UID of the holder.
    pub uid: String,
    pub namespace: String,
    pub name: String,
    pub pool: String,
    /// Empty for a public address.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub vpc: String,
    pub address: IpAddr,
    pub state: LeaseState,
    /// What a release names: another one in each answer that gives or renews the lease.
    pub grant: String,
    /// The seconds for which the lease is valid from the moment when the holder sent the request.
    pub lease_seconds: u32,
    /// The seconds for which nobody else gets the address after its release.
    pub quarantine_seconds: u32,
}

/// Leases, of one holder or of all.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Leases {
    pub leases: Vec<Lease>,
}

impl FromIterator<IpLease> for Leases {
    fn from_iter<T: IntoIterator<Item = IpLease>>(leases: T) -> Self {
        let read = |lease: IpLease| {
            let (address, state, grant) = (crate::lease::address(&lease)?, lease.state(), lease.grant());
            let spec = lease.spec;
            Some(Lease {
                uid: spec.holder.uid,
                namespace: spec.holder.namespace,
                name: spec.holder.name,
                pool: spec.pool,
                vpc: spec.vpc,
                address,
                state,
                grant,
                lease_seconds: spec.lease_seconds,
                quarantine_seconds: spec.quarantine_seconds,
            })
        };
        let leases = leases.into_iter().filter_map(read).collect();
        Self { leases }
    }
}

/// What a holder asks for: the body of `PUT /v1/leases/{uid}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Wanted {
    pub pool: String,
    /// The namespace of the object that the addresses are for.
    pub namespace: String,
    /// The object's name.
    pub name: String,
    /// The families of which an address is wanted, whatever address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub families: Vec<Family>,
    /// Addresses that are wanted: at most one of each family.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<IpAddr>,
}

/// What a holder gives back: the body of `DELETE /v1/leases/{uid}`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Released {
    /// [`Lease::grant`] of each address, of the last answer. What was given or renewed since stays.
    pub grants: Vec<String>,
}

impl Wanted {
    fn request(self, uid: String) -> Result<Request, Problem> {
        let invalid = |field: &str, detail: &str| {
            Problem::new(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", detail, field)
        };
        let mut wanted: BTreeMap<Family, Option<IpAddr>> =
            self.families.into_iter().map(|family| (family, None)).collect();
        for address in self.addresses {
            if let Some(Some(_)) = wanted.insert(address.into(), Some(address)) {
                return Err(invalid("addresses", "name at most one address of each family"));
            }
        }
        if wanted.is_empty() {
            return Err(invalid("families", "name IPv4, IPv6 or both, or addresses"));
        }
        for (field, value, longest) in [("namespace", &self.namespace, 63), ("name", &self.name, 253)] {
            if value.is_empty() || value.len() > longest {
                return Err(invalid(field, "name the object that the addresses are for"));
            }
        }
        Ok(Request {
            holder: LeaseHolder {
                uid,
                namespace: self.namespace,
                name: self.name,
            },
            wanted,
        })
    }
}

struct Service<S, P> {
    store: S,
    pools: P,
    room: Semaphore,
}

/// Returns the API on a store and pools.
pub fn router<S: Store, P: Pools>(store: S, pools: P) -> Router {
    let service = Arc::new(Service {
        store,
        pools,
        room: Semaphore::new(AT_ONCE),
    });
    Router::new()
        .route("/v1/leases", get(list::<S, P>))
        .route(
            "/v1/leases/{uid}",
            get(show::<S, P>).put(put::<S, P>).delete(delete::<S, P>),
        )
        .route("/v1/leases/{uid}/renew", post(renewal::<S, P>))
        .fallback(async || Problem::new(StatusCode::NOT_FOUND, "UnknownPath", "see /v1/leases", ""))
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
        .layer(from_fn_with_state(service.clone(), within_limits::<S, P>))
        .with_state(service)
}

async fn within_limits<S: Store, P: Pools>(
    State(service): State<Arc<Service<S, P>>>,
    request: HttpRequest,
    next: Next,
) -> Response {
    let unavailable = |reason, detail| Problem::new(StatusCode::SERVICE_UNAVAILABLE, reason, detail, "");
    let method = request.method().clone();
    let response = match service.room.try_acquire() {
        Err(_) => unavailable("Busy", "too many requests at once: try again").into_response(),
        Ok(_held) => timeout(REQUEST_TIMEOUT, next.run(request))
            .await
            .unwrap_or_else(|_| {
                unavailable("Slow", "the API server takes too long: try again").into_response()
            }),
    };
    metrics::answered(&method, response.status());
    response
}

/// Checks a holder's UID: the API server is asked for it as it is.
fn holder(uid: String) -> Result<String, Problem> {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    if uid.is_empty() || uid.len() > 63 || !uid.bytes().all(is_plain) {
        let detail = "a UID has 1 to 63 letters, digits and dashes";
        return Err(Problem::new(
            StatusCode::UNPROCESSABLE_ENTITY,
            "Invalid",
            detail,
            "uid",
        ));
    }
    Ok(uid)
}

fn unreadable(error: &JsonRejection) -> Problem {
    Problem::new(error.status(), "Invalid", error.body_text(), "body")
}

fn no_lease() -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        "NoLease",
        "the holder has no address",
        "uid",
    )
}

async fn list<S: Store, P: Pools>(
    State(service): State<Arc<Service<S, P>>>,
) -> Result<Json<Leases>, Problem> {
    Ok(Json(
        crate::lease::list(&service.store).await?.into_iter().collect(),
    ))
}

async fn show<S: Store, P: Pools>(
    State(service): State<Arc<Service<S, P>>>,
    Path(uid): Path<String>,
) -> Result<Json<Leases>, Problem> {
    let leases = crate::lease::of_holder(&service.store, &holder(uid)?).await?;
    if leases.is_empty() {
        return Err(no_lease());
    }
    Ok(Json(leases.into_iter().collect()))
}

async fn put<S: Store, P: Pools>(
    State(service): State<Arc<Service<S, P>>>,
    Path(uid): Path<String>,
    wanted: Result<Json<Wanted>, JsonRejection>,
) -> Result<Json<Leases>, Problem> {
    let Json(wanted) = wanted.map_err(|error| unreadable(&error))?;
    let pool = wanted.pool.clone();
    let terms = service.pools.terms(&pool, &wanted.namespace);
    let request = wanted.request(holder(uid)?)?;
    let leases = match terms {
        Ok(terms) => assign(&service.store, &terms, &request).await?,
        // What a holder has stays, although the pool gives nothing any more.
        Err(error) => {
            let held = renew_held(&service.store, &pool, &request).await?;
            held.ok_or(error)?
        }
    };
    Ok(Json(leases.into_iter().collect()))
}

async fn renewal<S: Store, P: Pools>(
    State(service): State<Arc<Service<S, P>>>,
    Path(uid): Path<String>,
) -> Result<Json<Leases>, Problem> {
    let leases = renew(&service.store, &holder(uid)?).await?;
    if leases.is_empty() {
        return Err(no_lease());
    }
    Ok(Json(leases.into_iter().collect()))
}

async fn delete<S: Store, P: Pools>(
    State(service): State<Arc<Service<S, P>>>,
    Path(uid): Path<String>,
    released: Result<Json<Released>, JsonRejection>,
) -> Result<StatusCode, Problem> {
    let Json(released) = released.map_err(|error| unreadable(&error))?;
    release(&service.store, &holder(uid)?, &released.grants).await?;
    Ok(StatusCode::NO_CONTENT)
}
