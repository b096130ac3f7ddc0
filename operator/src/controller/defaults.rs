//! The VPC and the network `default`, for pods that name none (the seed's second trigger of both workflows).

use kube::{Api, Client};
use thuban_api::{DEFAULT_NAME, DEFAULT_ROLES, Network, NetworkSpec, Vpc, VpcSpec};
use tracing::info;

use crate::controller::runtime::objects::{WriteError, create, get};

/// Creates the objects that are missing, and leaves the others as they are.
pub async fn ensure(client: &Client, cidr: &str) -> Result<(), WriteError> {
    let vpcs: Api<Vpc> = Api::all(client.clone());
    let spec = VpcSpec {
        cidrs: vec![cidr.to_owned()],
        dividers: DEFAULT_ROLES,
        autoscale: None,
        egress: None,
        shared_services: None,
        allowed_namespaces: None,
        bandwidth: None,
        dscp: None,
        denied_traffic: None,
    };
    if get(&vpcs, DEFAULT_NAME).await?.is_none() {
        ignore_existing(create(&vpcs, &Vpc::new(DEFAULT_NAME, spec)).await)?;
        info!(vpc = DEFAULT_NAME, cidr, "default VPC created");
    }
    while get(&vpcs, DEFAULT_NAME)
        .await?
        .is_none_or(|vpc| vpc.status.is_none_or(|status| status.vni.is_none()))
    {
        tokio::time::sleep(std::time::Duration::from_millis(200)).await;
    }
    let networks: Api<Network> = Api::all(client.clone());
    let spec = NetworkSpec {
        vpc: DEFAULT_NAME.to_owned(),
        cidrs: vec![cidr.to_owned()],
        bouncers: DEFAULT_ROLES,
        autoscale: None,
        egress: None,
        bandwidth: None,
        allowed_namespaces: None,
        allow_static_ips: false,
    };
    if get(&networks, DEFAULT_NAME).await?.is_none() {
        ignore_existing(create(&networks, &Network::new(DEFAULT_NAME, spec)).await)?;
        info!(network = DEFAULT_NAME, cidr, "default network created");
    }
    Ok(())
}

fn ignore_existing<K>(result: Result<K, WriteError>) -> Result<(), WriteError> {
    match result {
        Ok(_) => Ok(()),
        Err(error) if error.is_conflict() => Ok(()),
        Err(error) => Err(error),
    }
}
