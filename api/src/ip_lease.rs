//! IpLease: one address of an IpPool in somebody's hands.

use std::net::IpAddr;

use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The address, who has it, and the terms. It can't be changed.
/// The object's name is the address, an IPv6 address as 32 hex digits. `<vpc>.` precedes a private address.
#[derive(CustomResource, Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[kube(
    group = "thuban.dev",
    version = "v1alpha1",
    kind = "IpLease",
    doc = "The lease of one address of an IpPool. The object's name is the address, so nobody else can lease it. cidrd creates and deletes IpLeases.",
    plural = "ipleases",
    shortname = "ipl",
    status = "IpLeaseStatus",
    selectable = ".spec.pool",
    selectable = ".spec.holder.uid",
    printcolumn(name = "Address", type_ = "string", json_path = ".spec.address"),
    printcolumn(name = "Pool", type_ = "string", json_path = ".spec.pool"),
    printcolumn(name = "Namespace", type_ = "string", json_path = ".spec.holder.namespace"),
    printcolumn(name = "Name", type_ = "string", json_path = ".spec.holder.name"),
    printcolumn(name = "State", type_ = "string", json_path = ".status.state"),
    printcolumn(name = "Renewed", type_ = "date", json_path = ".status.renewedAt"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[kube(
    validation = Rule::new("self.spec == oldSelf.spec").message("spec is immutable: a lease is what it was made for, or is deleted"),
    validation = Rule::new("!isIP(self.spec.address) || (ip(self.spec.address).family() == 4 ? self.metadata.name == (self.spec.vpc == '' ? '' : self.spec.vpc + '.') + self.spec.address : self.metadata.name.size() == (self.spec.vpc == '' ? 0 : self.spec.vpc.size() + 1) + 32 && self.metadata.name.matches('^([-a-z0-9]+[.])?[0-9a-f]{32}$') && (self.spec.vpc == '' || self.metadata.name.startsWith(self.spec.vpc + '.')))")
        .message("metadata.name must be spec.address, IPv6 as 32 hex digits, after <spec.vpc>. if that is set, such as 203.0.113.7 or red.10.0.9.7")
)]
#[serde(rename_all = "camelCase")]
pub struct IpLeaseSpec {
    /// The name of the IpPool that the address is from.
    #[schemars(length(min = 1, max = 63))]
    pub pool: String,
    /// The name of the VPC that the pool belongs to. Empty for a public address.
    #[serde(default)]
    #[schemars(length(max = 63))]
    pub vpc: String,
    /// The leased IPv4 or IPv6 address in its shortest form, such as 203.0.113.7 or 2001:db8:7::7.
    #[x_kube(
        validation = Rule::new("isIP(self) && ip.isCanonical(self)")
            .message("spec.address must be an IP address in its shortest form, such as 203.0.113.7 or 2001:db8:7::7")
    )]
    #[schemars(length(max = 39))]
    pub address: String,
    /// Who has the address.
    pub holder: LeaseHolder,
    /// The seconds for which the lease is valid without a renewal.
    #[schemars(range(min = 1))]
    pub lease_seconds: u32,
    /// The seconds for which the address is leased to nobody else after its release.
    #[schemars(range(min = 1))]
    pub quarantine_seconds: u32,
}

/// Who has an address.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct LeaseHolder {
    /// The UID of the object that the address is for. It has at most one lease of each family.
    #[schemars(length(min = 1, max = 63))]
    pub uid: String,
    /// The object's namespace.
    #[schemars(length(min = 1, max = 63))]
    pub namespace: String,
    /// The object's name.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// What became of the lease. Only cidrd writes it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct IpLeaseStatus {
    pub state: LeaseState,
    /// The time of the last renewal, in RFC 3339 format. It is for people: cidrd measures by clocks that nobody sets.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renewed_at: Option<String>,
    /// How often cidrd gave or renewed the lease.
    pub renewals: u64,
}

/// Where a lease stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
pub enum LeaseState {
    /// cidrd keeps the address for the holder, and has not said so. It becomes Held, or goes within minutes.
    #[default]
    Proposed,
    /// The holder has the address.
    Held,
    /// Nobody has the address. Only its last holder can get it before the quarantine is over.
    Quarantined,
}

impl IpLease {
    /// Returns the name of an address's lease. `vpc`: empty for a public address.
    pub fn name_of(vpc: &str, address: IpAddr) -> String {
        let address = match address {
            IpAddr::V4(address) => address.to_string(),
            IpAddr::V6(address) => format!("{:032x}", u128::from(address)),
        };
        if vpc.is_empty() {
            address
        } else {
            format!("{vpc}.{address}")
        }
    }

    /// Returns the name of what the holder was given last: each answer that gives or renews has another one.
    pub fn grant(&self) -> String {
        let renewals = self.status.as_ref().map_or(0, |status| status.renewals);
        format!("{}.{renewals}", self.metadata.uid.as_deref().unwrap_or_default())
    }

    /// Returns the state; an object without a status is Proposed.
    pub fn state(&self) -> LeaseState {
        self.status
            .as_ref()
            .map(|status| status.state)
            .unwrap_or_default()
    }
}
