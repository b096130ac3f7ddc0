//! Kinds of objects that the fake API server keeps.

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    Pod,
    Namespace,
    Node,
    Vpc,
    Network,
    Endpoint,
    Divider,
    Bouncer,
    Droplet,
    IpClaim,
    VniClaim,
    PolicyState,
    PathTrace,
    Service,
    EndpointSlice,
    NetworkPolicy,
    ClusterNetworkPolicy,
    ServiceCidr,
    /// Events that are reported once; of other events only the fact that they were written.
    Event,
}

impl Kind {
    pub const ALL: [Self; 19] = [
        Self::Pod,
        Self::Namespace,
        Self::Node,
        Self::Vpc,
        Self::Network,
        Self::Endpoint,
        Self::Divider,
        Self::Bouncer,
        Self::Droplet,
        Self::IpClaim,
        Self::VniClaim,
        Self::PolicyState,
        Self::PathTrace,
        Self::Service,
        Self::EndpointSlice,
        Self::NetworkPolicy,
        Self::ClusterNetworkPolicy,
        Self::ServiceCidr,
        Self::Event,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Pod => "Pod",
            Self::Namespace => "Namespace",
            Self::Node => "Node",
            Self::Vpc => "Vpc",
            Self::Network => "Network",
            Self::Endpoint => "Endpoint",
            Self::Divider => "Divider",
            Self::Bouncer => "Bouncer",
            Self::Droplet => "Droplet",
            Self::IpClaim => "IpClaim",
            Self::VniClaim => "VniClaim",
            Self::PolicyState => "PolicyState",
            Self::PathTrace => "PathTrace",
            Self::Service => "Service",
            Self::EndpointSlice => "EndpointSlice",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::ClusterNetworkPolicy => "ClusterNetworkPolicy",
            Self::ServiceCidr => "ServiceCIDR",
            Self::Event => "Event",
        }
    }

    pub fn plural(self) -> &'static str {
        match self {
            Self::Pod => "pods",
            Self::Namespace => "namespaces",
            Self::Node => "nodes",
            Self::Vpc => "vpcs",
            Self::Network => "networks",
            Self::Endpoint => "endpoints",
            Self::Divider => "dividers",
            Self::Bouncer => "bouncers",
            Self::Droplet => "droplets",
            Self::IpClaim => "ipclaims",
            Self::VniClaim => "vniclaims",
            Self::PolicyState => "policystates",
            Self::PathTrace => "pathtraces",
            Self::Service => "services",
            Self::EndpointSlice => "endpointslices",
            Self::NetworkPolicy => "networkpolicies",
            Self::ClusterNetworkPolicy => "clusternetworkpolicies",
            Self::ServiceCidr => "servicecidrs",
            Self::Event => "events",
        }
    }

    pub fn of(plural: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.plural() == plural)
    }

    pub fn is_ours(self) -> bool {
        !matches!(
            self,
            Self::Pod
                | Self::Namespace
                | Self::Node
                | Self::Service
                | Self::EndpointSlice
                | Self::NetworkPolicy
                | Self::ClusterNetworkPolicy
                | Self::ServiceCidr
                | Self::Event
        )
    }

    pub fn api_version(self) -> &'static str {
        match self {
            Self::EndpointSlice => "discovery.k8s.io/v1",
            Self::NetworkPolicy | Self::ServiceCidr => "networking.k8s.io/v1",
            Self::ClusterNetworkPolicy => "policy.networking.k8s.io/v1alpha2",
            Self::Event => "events.k8s.io/v1",
            _ if self.is_ours() => "thuban.dev/v1alpha1",
            _ => "v1",
        }
    }
}
