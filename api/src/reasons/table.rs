//! Reasons that the operator gives.

super::reasons! {
    // Who may enter.
    "NetworkNotFound", "Pod, Service, Endpoint":
        "the network that it asks for does not exist"
        => "correct the annotation thuban.dev/network or spec.network, or have the owner of the VPC create the Network";
    "VpcNotFound", "Pod, Service, Endpoint":
        "the VPC of its network does not exist"
        => "create the Vpc, or choose another network";
    "NamespaceNotAllowed", "Pod, Service, Endpoint":
        "the VPC or the network does not admit the namespace"
        => "choose another network, or ask the owner of the VPC to select the namespace in spec.allowedNamespaces";
    "NamespaceNotFound", "Pod, Service, Endpoint":
        "the operator has not seen the namespace yet"
        => "wait some seconds; if it stays, look whether the operator leads";
    "NetworkDeleting", "Pod, Service, Endpoint":
        "its network is being deleted and takes nobody"
        => "choose another network";
    "VpcDeleting", "Pod, Service, Endpoint":
        "the VPC of its network is being deleted and takes nobody"
        => "choose a network of another VPC";

    // Addresses.
    "NetworkFull", "Pod, Endpoint":
        "the network has no free address"
        => "have the owner of the network append a range to spec.cidrs, or delete Endpoints that no pod has";
    "AddressesNearlyUsedUp", "Network":
        "nine of ten IPv4 addresses of the network are used"
        => "append a range to spec.cidrs, or delete Endpoints that no pod has";
    "AddressUnfit", "Pod, Service, Endpoint":
        "the address that it asks for is not in the network, is reserved, or static addresses are not allowed"
        => "ask for another address, or have allowStaticIPs of the Network set";
    "AddressTaken", "Pod, Service, Endpoint":
        "another endpoint of the VPC has the address that it asks for"
        => "wait, because it is tried again, or ask for another address";
    "AddressTaken", "Droplet":
        "another droplet has the node's address"
        => "give one of the nodes another address, or delete the other Node if it is gone";
    "AddressInUseOnNode", "Pod, Endpoint":
        "endpoints of other VPCs have the address, or all free addresses of the network, on the same node"
        => "run the pod on another node, or have the owner of the network append a range to spec.cidrs";
    "TooMany", "Service":
        "the Service asks for more than one address of a family"
        => "name at most one address of each family in thuban.dev/service-ip";
    "ClaimDenied", "Pod, Service, Endpoint":
        "a quota, webhook or policy refuses the claim of the address"
        => "raise the quota, or correct the webhook or policy";
    "EndpointDenied", "Pod, Service, Droplet":
        "a quota, webhook or policy refuses the Endpoint"
        => "raise the quota, or correct the webhook or policy: it is tried again within a minute";
    "EndpointNotFound", "Pod":
        "the annotation thuban.dev/endpoint names an Endpoint that no user created"
        => "create the Endpoint, or correct the annotation";
    "EndpointInUse", "Pod":
        "another pod has the Endpoint that the pod names"
        => "wait for the end of that pod";
    "EndpointNameTaken", "Service, Droplet":
        "an Endpoint that a user made has the name that its own Endpoint needs"
        => "delete the Endpoint that the message names";
    "Unattached", "Endpoint":
        "no running pod has the Endpoint, and its addresses are kept"
        => "nothing to do: a pod gets it by the annotation thuban.dev/endpoint";

    // Annotations.
    "InvalidAnnotation", "Pod, Service, Vip, NetworkPolicy, ClusterNetworkPolicy":
        "an annotation can't be read"
        => "correct the annotation that the event or the condition names";
    "UnknownAnnotation", "Pod, Service, Namespace":
        "an annotation thuban.dev/... is not known there and has no effect"
        => "correct its key, at a pod by creating the pod again, or remove it";
    "BandwidthLimited", "Pod":
        "the pod asks for more bandwidth than its network allows"
        => "ask for less, or have the maximum in spec.bandwidth of the Network raised";

    // Waiting for droplets.
    "NetworkNotProvisioned", "Endpoint":
        "its network is not Provisioned"
        => "look at the conditions of the Network";
    "WaitsForAcks", "Endpoint, Network, Vpc, PolicyState, Service":
        "droplets have not acknowledged what they were sent"
        => "wait some seconds; if it stays, look whether the droplets that the message names are Connected";
    "WaitsForUpgrade", "Endpoint, Bouncer, Divider, PolicyState":
        "transitd on some droplets does not understand what they need to know"
        => "upgrade transitd on the droplets that the message names";
    "TableFull", "Endpoint, Bouncer, Divider, PolicyState":
        "droplets have no room for its rows"
        => "run fewer pods, networks, Services or policies on the droplets that the message names";

    // VPCs and networks.
    "InvalidCidr", "Vpc, Network, IpPool":
        "a range can't be read, or is of a wrong family or size"
        => "correct the range that the message names";
    "RangeRefused", "Vpc, Network, IpPool":
        "a range touches Services, nodes, the underlay, the VPC default, or ranges that nobody may use"
        => "choose another range";
    "RangeRefused", "ServiceCIDR":
        "the range touches the underlay or the address of an older node: no Service is served in it"
        => "choose another range for Services";
    "RangeOverlaps", "Vpc, Network, IpPool":
        "a range overlaps another range of the same object or VPC, or of another pool"
        => "choose a free range";
    "RangeOverlapsVpc", "ServiceCIDR":
        "the range touches ranges of a VPC: the pods of that VPC reach no Service in it"
        => "choose another range for Services";
    "RangesClaimed", "Vpc, Network":
        "another object asks for the same range at this moment"
        => "wait a second";
    "OutsideVpc", "Network":
        "a range is in no range of the VPC"
        => "choose a range within the VPC, or append one to spec.cidrs of the Vpc";
    "VpcNotFound", "Network, IpPool":
        "its VPC does not exist"
        => "create the Vpc, or name another one";
    "VpcNotAccepted", "Network":
        "its VPC was refused"
        => "look at the conditions of the Vpc";
    "VpcLeaves", "Network":
        "its VPC is being deleted"
        => "name another VPC, or make the VPC anew when it is gone";
    "VpcNotProvisioned", "Network":
        "its VPC is not Provisioned"
        => "look at the conditions of the Vpc";
    "DividersNotProvisioned", "Vpc":
        "its dividers are not Provisioned"
        => "look at the conditions of the Dividers that the message names";
    "BouncersNotProvisioned", "Network":
        "its bouncers are not Provisioned"
        => "look at the conditions of the Bouncers that the message names";
    "DropletsShared", "Vpc, Network":
        "several of its dividers or bouncers are on one droplet and are lost together if it dies"
        => "add nodes, or lower the number in the spec";
    "TooFewDroplets", "Vpc, Network":
        "it has fewer dividers or bouncers than its spec asks for, because each needs a droplet of its own"
        => "add nodes or uncordon them, or lower the number in the spec";
    "ServiceNotShared", "Vpc":
        "an entry of spec.sharedServices does not exist, or is in another VPC than default"
        => "correct the entry, or create the Service in the VPC default";

    // Bouncers and dividers.
    "NoDroplet", "Bouncer, Divider":
        "no droplet can take it"
        => "look at kubectl get droplets: one must be Connected and Accepted, and its Node not cordoned";
    "Filling", "Bouncer, Divider":
        "its droplet does not have its tables yet"
        => "wait some seconds; if it stays, look whether the droplet is Connected";
    "Announcing", "Bouncer, Divider":
        "droplets that use it do not know its place yet"
        => "wait some seconds; if it stays, look whether the droplets that the message names are Connected";
    "Placed", "Bouncer, Divider":
        "the operator has chosen a droplet for it"
        => "nothing to do";
    "DropletGone", "Bouncer, Divider":
        "it moves, because its droplet does not exist any more or is refused"
        => "nothing to do";
    "DropletSuspect", "Bouncer, Divider":
        "it moves, because its droplet is away"
        => "look at the droplet that it left";
    "NodeCordoned", "Bouncer, Divider":
        "it moves, because its Node is cordoned"
        => "nothing to do";
    "DropletShared", "Bouncer, Divider":
        "it moves, because another of its kind is on the same droplet"
        => "nothing to do";
    "DropletRefused", "Bouncer, Divider":
        "it moves, because its droplet did not take its tables"
        => "look at the log of transitd on the droplet that it left";

    // Droplets.
    "Suspect", "Droplet":
        "transitd has had no stream to the operator for 10 s, or has not acknowledged a row for 60 s"
        => "look at the log of transitd on the node, and at TCP 6082 from the node to the operator";
    "NotReady", "Droplet":
        "transitd has no stream to the operator, and the Node's condition Ready is Unknown"
        => "look at the node; if it is gone for good, delete the Node";
    "OutOfService", "Droplet":
        "its Node has the taint node.kubernetes.io/out-of-service: all that was on it counts as gone"
        => "remove the taint when the node is back";
    "WrongNode", "Droplet":
        "spec.node is not the name of the object"
        => "delete the Droplet: transitd makes it again";
    "WrongAddress", "Droplet":
        "spec.ip is no InternalIP of the Node"
        => "give transitd one of the Node's InternalIPs as NODE_IP, or correct the Node's addresses";
    "AddressConflict", "Droplet":
        "a VPC has a range with an address of the node"
        => "give the node another address, or remove the VPC";

    // Services.
    "NoBackends", "Endpoint":
        "no backend of the Service is ready: new connections are refused"
        => "look at the pods that the Service selects";
    "TooLarge", "Endpoint":
        "the Service is over a limit of size: nothing of it is served"
        => "give it fewer ports, addresses or backends";
    "OutsideServiceRanges", "Endpoint":
        "an address of the Service is in no range of Services that its VPC can use"
        => "add the range to THUBAN_SERVICE_CIDRS, or make the Service again";
    "BackendsLeftOut", "Endpoint":
        "some ready addresses of the Service are no pods of its namespace in its VPC"
        => "look at the network of the pods that the message names";
    "OverlayPort", "Endpoint":
        "the Service uses UDP port 6081 of nodes or outside, which the overlay needs: that port has no effect"
        => "use another port";
    "PortRests", "Endpoint":
        "another VPC had the NodePort shortly before, and a node may not know of the change yet"
        => "wait: the port opens by itself";
    "ExternalIPsNotAllowed", "Service, Endpoint":
        "addresses of spec.externalIPs are in no range that is allowed, and have no effect"
        => "have the range added to THUBAN_EXTERNAL_IP_CIDRS, or remove the addresses";

    // Network policies.
    "Malformed", "NetworkPolicy, ClusterNetworkPolicy, PolicyState":
        "Thuban does not understand a field of the policy: what the field would accept is denied"
        => "correct the field that the message names";
    "TooManyPolicies", "NetworkPolicy, ClusterNetworkPolicy, PolicyState":
        "the namespace has more policies than the limit, and this one accepts nothing"
        => "join policies, or delete some";
    "TooManyRules", "Pod, Endpoint":
        "so many rules of policies apply to the pod that all its packets are denied"
        => "join rules or policies that select the pod";
    "NetworkPolicyNotEnforced", "NetworkPolicy":
        "nodes of an older transitd do not enforce the policy"
        => "upgrade transitd on all nodes";

    // Deletion.
    "WaitsForEndpoints", "Network":
        "it is being deleted and still has endpoints"
        => "delete the pods, Services and Endpoints of the network";
    "WaitsForNetworks", "Vpc":
        "it is being deleted and still has networks"
        => "delete the Networks that the message names";
    "WaitsForBouncers", "Network":
        "it is being deleted and its bouncers are not gone yet"
        => "wait; if it stays, look at the Bouncers that the message names";
    "WaitsForDividers", "Vpc":
        "it is being deleted and its dividers are not gone yet"
        => "wait; if it stays, look at the Dividers that the message names";
    "WaitsForPod", "Endpoint":
        "it is being deleted and stays until its pod has ended"
        => "end the pod";
    "WaitsForNode", "Endpoint":
        "its node has not reported that its addresses are out of use"
        => "bring the node back; if it is gone for good, delete the Node";
    "WaitsForService", "Endpoint":
        "somebody deleted the Endpoint of a Service; it stays until the Service goes"
        => "delete the Service, if it should go";
    "WaitsForAnother", "Bouncer, Divider":
        "it is being deleted and serves until a substitute works"
        => "wait; if it stays, look at kubectl get bouncers,dividers";
    "WaitsForUsers", "Bouncer, Divider":
        "it is being deleted and droplets may still use it"
        => "wait; if it stays, look whether the droplets that the message names are Connected";
    "WaitsForTables", "Bouncer, Divider":
        "it is being deleted and its droplet still has its tables"
        => "wait; if it stays, look whether that droplet is Connected";
    "OldCrd", "Bouncer, Divider":
        "the CRDs are too old to keep status.leaving, so it can't be removed safely"
        => "apply install/10-crds.yaml of the installed version";
}
