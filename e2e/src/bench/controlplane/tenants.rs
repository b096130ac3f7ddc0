//! VPCs, their networks, and for each network a namespace with pods in it.

use anyhow::{Context, Result};
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::{Namespace, Pod, ServiceAccount};
use kube::{
    Api, Client,
    api::{DeleteParams, PostParams},
};
use serde_json::json;
use thuban_api::{NETWORK_ANNOTATION, Network, Vpc};

use super::{fleet::node_name, track::pod_name};

const PARALLEL: usize = 24;
/// The number of VPCs with ranges of their own. The next VPCs have the same ranges again, as tenants do.
const RANGES: usize = 50;

pub fn vpc_name(number: usize) -> String {
    format!("v{number}")
}

/// The networks of the run: the same number in every VPC.
#[derive(Clone, Copy, Debug)]
pub struct Tenants {
    pub networks_per_vpc: usize,
    pub bouncers: u32,
}

impl Tenants {
    pub fn network_name(self, network: usize) -> String {
        let (vpc, index) = (network / self.networks_per_vpc, network % self.networks_per_vpc);
        format!("{}-n{index}", vpc_name(vpc))
    }

    pub fn namespace(self, network: usize) -> String {
        format!("t-{}", self.network_name(network))
    }

    /// Makes these VPCs.
    pub async fn make_vpcs(self, admin: &Client, vpcs: impl Iterator<Item = usize>) -> Result<()> {
        let api: Api<Vpc> = Api::all(admin.clone());
        let make = |number: usize| {
            let (api, vpc) = (api.clone(), vpc(&vpc_name(number), number));
            async move {
                api.create(&PostParams::default(), &vpc?)
                    .await
                    .with_context(|| format!("VPC {}", vpc_name(number)))
            }
        };
        stream::iter(vpcs)
            .map(make)
            .buffer_unordered(PARALLEL)
            .try_for_each(|_| std::future::ready(Ok(())))
            .await
    }

    /// Makes these networks and their namespaces.
    pub async fn make_networks(self, admin: &Client, networks: impl Iterator<Item = usize>) -> Result<()> {
        stream::iter(networks)
            .map(|network| self.make_network(admin, network))
            .buffer_unordered(PARALLEL)
            .try_for_each(|()| std::future::ready(Ok(())))
            .await
    }

    async fn make_network(self, admin: &Client, number: usize) -> Result<()> {
        let (vpc, index) = (number / self.networks_per_vpc, number % self.networks_per_vpc);
        let (name, space) = (self.network_name(number), self.namespace(number));
        let parameters = PostParams::default();
        let network: Network = serde_json::from_value(json!({
            "apiVersion": "thuban.dev/v1alpha1", "kind": "Network", "metadata": {"name": name},
            "spec": {
                "vpc": vpc_name(vpc), "cidrs": [format!("10.{}.{index}.0/24", vpc % RANGES)],
                "bouncers": self.bouncers, "allowedNamespaces": {},
            },
        }))?;
        let namespace: Namespace = serde_json::from_value(json!({
            "metadata": {"name": space, "annotations": {NETWORK_ANNOTATION: name}},
        }))?;
        // The controller that makes the ServiceAccount does not run here.
        let account: ServiceAccount = serde_json::from_value(json!({"metadata": {"name": "default"}}))?;
        let failed = || format!("network {name}");
        Api::<Network>::all(admin.clone())
            .create(&parameters, &network)
            .await
            .with_context(failed)?;
        Api::<Namespace>::all(admin.clone())
            .create(&parameters, &namespace)
            .await
            .with_context(failed)?;
        Api::<ServiceAccount>::namespaced(admin.clone(), &space)
            .create(&parameters, &account)
            .await
            .with_context(failed)?;
        Ok(())
    }

    /// Returns a pod of a network, bound to a droplet. It exists as an object only.
    pub fn pod(self, number: usize, network: usize, droplet: usize) -> Result<Pod> {
        let name = pod_name(number);
        Ok(serde_json::from_value(json!({
            "metadata": {
                "name": name, "namespace": self.namespace(network),
                "labels": {"app.kubernetes.io/name": "load", "app.kubernetes.io/instance": name},
            },
            "spec": {
                "nodeName": node_name(droplet), "terminationGracePeriodSeconds": 0,
                "containers": [{
                    "name": "main", "image": "example.org/main:1",
                    "resources": {"requests": {"cpu": "10m", "memory": "16Mi"}},
                }],
            },
        }))?)
    }
}

/// Returns a VPC that admits all namespaces.
pub fn vpc(name: &str, number: usize) -> Result<Vpc> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vpc", "metadata": {"name": name},
        "spec": {"cidrs": [format!("10.{}.0.0/16", number % RANGES)], "allowedNamespaces": {}},
    }))?)
}

/// Returns the parameters with which kubelet ends a pod's object.
pub fn at_once() -> DeleteParams {
    DeleteParams::default().grace_period(0)
}
