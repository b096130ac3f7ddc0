//! Copies of the kinds that a VPC is made of, in a group of their own: the same schemas and rules, and nobody looks
//! after the objects. The time that the API server takes for writes of them is its own share of the time of VPCs.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::{
    Api, Client,
    api::{
        ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, ObjectMeta, Patch,
        PatchParams, PostParams,
    },
};
use serde_json::{Value, json};
use thuban_api::{DEFAULT_ROLES, GROUP};

const COPIES: &str = "bench.thuban.dev";
const VERSION: &str = "v1alpha1";
/// How long the API server may take until it serves a new kind.
const SERVED_TIMEOUT: Duration = Duration::from_secs(30);
/// How long the API server is left alone after that: new kinds make it build its schemas again.
const REST: Duration = Duration::from_secs(5);
/// The writes of a VPC before those of its dividers.
const BEFORE_ROLES: usize = 4;

pub struct Copies {
    crds: Api<CustomResourceDefinition>,
    vpcs: Api<DynamicObject>,
    claims: Api<DynamicObject>,
    dividers: Api<DynamicObject>,
}

impl Copies {
    /// Makes the kinds, and waits until they are served.
    pub async fn make(admin: &Client) -> Result<Self> {
        let crds: Api<CustomResourceDefinition> = Api::all(admin.clone());
        let copies = Self {
            vpcs: copy(admin, &crds, "Vpc", "vpcs").await?,
            claims: copy(admin, &crds, "VniClaim", "vniclaims").await?,
            dividers: copy(admin, &crds, "Divider", "dividers").await?,
            crds,
        };
        for api in copies.all() {
            let start = Instant::now();
            while let Err(error) = api.list(&ListParams::default()).await {
                super::go_on()?;
                ensure!(
                    start.elapsed() < SERVED_TIMEOUT,
                    "a kind of {COPIES} is not served: {error}"
                );
                tokio::time::sleep(Duration::from_millis(100)).await;
            }
        }
        tokio::time::sleep(REST).await;
        Ok(copies)
    }

    fn all(&self) -> [&Api<DynamicObject>; 3] {
        [&self.vpcs, &self.claims, &self.dividers]
    }

    /// Returns the milliseconds for so many writes, which so many VPCs make side by side, each one after the other.
    pub async fn write(&self, round: usize, vpcs: usize, number: usize) -> Result<f64> {
        let start = Instant::now();
        let one = |vpc: usize| async move {
            for step in 0..(vpc..number).step_by(vpcs).len() {
                self.step(round, vpc, step).await?;
            }
            anyhow::Ok(())
        };
        stream::iter(0..vpcs)
            .map(one)
            .buffer_unordered(vpcs)
            .try_collect::<()>()
            .await?;
        let took = start.elapsed().as_secs_f64() * 1000.0;
        for api in self.all() {
            api.delete_collection(&DeleteParams::default(), &ListParams::default())
                .await
                .context("deleting copies")?;
        }
        Ok(took)
    }

    /// Makes one write of a VPC, in the operator's order.
    async fn step(&self, round: usize, vpc: usize, step: usize) -> Result<()> {
        let name = format!("c{round}-{vpc}");
        let vni = 1 + round * 1000 + vpc;
        let ranges = json!(["10.0.0.0/16"]);
        match step {
            0 => {
                let spec = json!({"cidrs": ranges, "allowedNamespaces": {}});
                create(&self.vpcs, "Vpc", &name, spec).await
            }
            1 => {
                // As much as the finalizer, but the object goes when it is deleted.
                let annotation = json!({"metadata": {"annotations": {"thuban.dev/rows": ""}}});
                let parameters = PatchParams::default();
                let done = self
                    .vpcs
                    .patch(&name, &parameters, &Patch::Merge(annotation))
                    .await;
                done.map(drop).with_context(|| format!("writing {name}"))
            }
            2 => {
                let spec = json!({"vpc": name, "vpcUid": name});
                create(&self.claims, "VniClaim", &vni.to_string(), spec).await
            }
            3 => {
                let status = json!({
                    "vni": vni, "cidrs": ranges, "ranges": "10.0.0.0/16", "observedGeneration": 1,
                    "conditions": [condition("Accepted")],
                });
                write_status(&self.vpcs, &name, status).await
            }
            _ if step < BEFORE_ROLES + 2 * DEFAULT_ROLES as usize => {
                let role = format!("{name}-d{}", (step - BEFORE_ROLES) / 2);
                if (step - BEFORE_ROLES).is_multiple_of(2) {
                    let spec = json!({"vpc": name, "droplet": "d0"});
                    create(&self.dividers, "Divider", &role, spec).await
                } else {
                    let status = json!({
                        "phase": "Provisioned", "droplet": "d0", "conditions": [condition("Ready")],
                    });
                    write_status(&self.dividers, &role, status).await
                }
            }
            _ => {
                let status = json!({
                    "phase": "Provisioned", "dividers": DEFAULT_ROLES, "workingDividers": DEFAULT_ROLES,
                    "networks": step, "conditions": [condition("Accepted"), condition("Ready")],
                });
                write_status(&self.vpcs, &name, status).await
            }
        }
    }

    /// Removes the kinds.
    pub async fn remove(self) -> Result<()> {
        for plural in ["vpcs", "vniclaims", "dividers"] {
            let name = format!("{plural}.{COPIES}");
            self.crds
                .delete(&name, &DeleteParams::default())
                .await
                .with_context(|| format!("deleting the kind {name}"))?;
        }
        Ok(())
    }
}

/// Makes a copy of a kind.
async fn copy(
    admin: &Client,
    crds: &Api<CustomResourceDefinition>,
    kind: &str,
    plural: &str,
) -> Result<Api<DynamicObject>> {
    let failed = || format!("copying the kind {kind}");
    let mut crd = crds
        .get(&format!("{plural}.{GROUP}"))
        .await
        .with_context(failed)?;
    crd.metadata = ObjectMeta {
        name: Some(format!("{plural}.{COPIES}")),
        ..ObjectMeta::default()
    };
    COPIES.clone_into(&mut crd.spec.group);
    (crd.spec.names.short_names, crd.spec.names.categories) = (None, None);
    crd.status = None;
    crds.create(&PostParams::default(), &crd)
        .await
        .with_context(failed)?;
    let kind = GroupVersionKind::gvk(COPIES, VERSION, kind);
    let resource = ApiResource::from_gvk_with_plural(&kind, plural);
    Ok(Api::all_with(admin.clone(), &resource))
}

async fn create(api: &Api<DynamicObject>, kind: &str, name: &str, spec: Value) -> Result<()> {
    let object: DynamicObject = serde_json::from_value(json!({
        "apiVersion": format!("{COPIES}/{VERSION}"), "kind": kind, "metadata": {"name": name}, "spec": spec,
    }))?;
    let created = api.create(&PostParams::default(), &object).await;
    created
        .map(drop)
        .with_context(|| format!("creating {kind} {name}"))
}

async fn write_status(api: &Api<DynamicObject>, name: &str, status: Value) -> Result<()> {
    let patch = Patch::Merge(json!({"status": status}));
    let written = api.patch_status(name, &PatchParams::default(), &patch).await;
    written
        .map(drop)
        .with_context(|| format!("writing the status of {name}"))
}

fn condition(kind: &str) -> Value {
    json!({
        "type": kind, "status": "True", "reason": "Provisioned", "message": "its dividers work",
        "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 1,
    })
}
