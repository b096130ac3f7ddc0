//! Reasons in the answers of PathTraces.

super::reasons! {
    "PodNotFound", "PathTrace":
        "there is no such pod"
        => "correct the pod's name or namespace";
    "PodNotBound", "PathTrace":
        "no node has been chosen for the pod, so that it has no network"
        => "look at the pod's events: the scheduler says why";
    "PodEnded", "PathTrace":
        "the pod has ended and sends and receives nothing"
        => "ask about a pod that runs";
    "HostNetwork", "PathTrace":
        "the pod uses its node's network, which Thuban does not look at"
        => "look at the node's own network";
    "NoEndpoint", "PathTrace":
        "the operator has not made the pod's Endpoint yet"
        => "wait some seconds; if it stays, look whether the operator leads: kubectl thuban status";
    "NotProvisioned", "PathTrace":
        "the pod has no network yet"
        => "look at the conditions of the pod's Endpoint: kubectl thuban endpoints";
    "TargetNotReady", "PathTrace":
        "the target has no network yet"
        => "ask the owner of the target's namespace";
    "NotInVpc", "PathTrace":
        "the target is in no network of the source's VPC"
        => "put both into one VPC, or reach the target by a Service that the source's VPC shares";
    "AddressFree", "PathTrace":
        "no pod and no Service has the address in the source's VPC"
        => "correct the address: in another VPC somebody else may have it";
    "NoSuchFamily", "PathTrace":
        "the source has no address of the target's family"
        => "use an address of the other family, or add an IPv6 range to the source's network";
    "NoEgress", "PathTrace":
        "pods of the VPC do not reach addresses outside"
        => "ask the owner of the VPC to set spec.egress";
    "NetworkPrivate", "PathTrace":
        "pods of the network do not reach addresses outside"
        => "ask the owner of the network to remove spec.egress false, or use another network";
    "RangeClosed", "PathTrace":
        "the address is of a node, of the underlay or of pods of the VPC default: no pod of another VPC reaches it"
        => "reach it by a Service that the VPC shares";
    "ServiceNotFound", "PathTrace":
        "there is no such Service, or it has no address"
        => "correct the name or namespace; ask about the pods of a Service without address";
    "ServiceNotReached", "PathTrace":
        "the source's VPC reaches no such Service: there is none, or the VPC does not share it"
        => "have the owner of the VPC add it to spec.sharedServices, if it is in the VPC default; or correct its name";
    "PortNotServed", "PathTrace":
        "the Service has no such port"
        => "correct the port or the protocol, or add the port to the Service";
    "PortNeeded", "PathTrace":
        "the answer depends on the port, and none was given"
        => "ask again with a port";
    "NoBackends", "PathTrace":
        "no backend of the Service is ready for the source: new connections are refused"
        => "look at the pods that the Service selects, and at its internalTrafficPolicy";
    "PolicyDenies", "PathTrace":
        "a network policy denies the packets"
        => "accept them in the policy that the message names, or ask the owner of the target's namespace";
    "PolicyChanges", "PathTrace":
        "network policies change at this moment"
        => "ask again in some seconds";
    "DropletSuspect", "PathTrace":
        "a droplet of the path has had no stream to the operator for long: nobody knows what it does"
        => "look at the droplet: kubectl thuban status";
    "DropletAway", "PathTrace":
        "a droplet of the path has no stream to the operator at this moment"
        => "ask again in some seconds; if it stays, look at the droplet: kubectl thuban status";
    "RowsMissing", "PathTrace":
        "a droplet of the path has not acknowledged what it must know"
        => "ask again in some seconds; if it stays, look at the log of transitd there";
    "RolesNotServing", "PathTrace":
        "no bouncer or divider that the path needs is connected and up to date"
        => "look at kubectl get bouncers,dividers";
    "TooManyTraces", "PathTrace":
        "the namespace has so many PathTraces that this one is not looked at"
        => "delete PathTraces that were answered, and ask again";
    "ProbeRefused", "PathTrace":
        "nothing listens at the target's port, or a network policy rejects the packet of the probe"
        => "look at what listens in the target, and at its port";
    "ProbeUnreachable", "PathTrace":
        "the packet of the probe was answered by an ICMP error, or the pod has no route"
        => "look at the last hop of the answer, and at the routes in the pod";
    "ProbeSilent", "PathTrace":
        "nothing answered the packet of the probe within 2 s"
        => "look at the last hop: a drop there has a reason; without one, look at the target's own firewall";
    "ProbeNotSent", "PathTrace":
        "no packet was sent: the message says why"
        => "correct what the message names, or ask again in some seconds";
}
