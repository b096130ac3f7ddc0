//! Objects that break a rule at their creation, by kind.

use serde_json::{Value, json};

use super::{Case, object, with};

pub(super) fn vpcs() -> Vec<Case> {
    let vpc = |field: &str, value: Value| {
        object(
            "Vpc",
            "rule",
            with(json!({"cidrs": ["10.0.0.0/16"]}), field, value),
        )
    };
    let most = json!({"maxDividers": 2});
    let cidrs: Vec<String> = (0..9).map(|number| format!("10.{number}.0.0/16")).collect();
    vec![
        Case(
            object("Vpc", "red.blue", json!({"cidrs": ["10.0.0.0/16"]})),
            "metadata.name must be a DNS label",
        ),
        Case(vpc("cidrs", json!([])), "spec.cidrs must have 1 to 8 ranges"),
        Case(vpc("cidrs", json!(cidrs)), "spec.cidrs"),
        Case(
            vpc("cidrs", json!(["banana"])),
            "spec.cidrs must be networks without host bits",
        ),
        Case(vpc("cidrs", json!(["10.0.0.1/16"])), "such as 10.0.0.0/16"),
        Case(
            vpc("cidrs", json!(["10.0.0.0/33"])),
            "spec.cidrs must be networks",
        ),
        Case(vpc("cidrs", json!(["fd00::/121"])), "IPv6 of /120 or larger"),
        Case(
            vpc("cidrs", json!(["10.0.0.0/16", "10.0.3.0/24"])),
            "spec.cidrs has a range twice, or one within another: keep the larger one alone",
        ),
        Case(
            vpc("dividers", json!(0)),
            "spec.dividers in body should be greater than or equal to 1",
        ),
        Case(
            vpc("dividers", json!(9)),
            "spec.dividers in body should be less than or equal to 8",
        ),
        Case(
            vpc("bandwidth", json!({"egressPerDroplet": "fast"})),
            "expected a quantity of bits per second between 1k and 1P, such as 100M",
        ),
        Case(
            vpc("dscp", json!(64)),
            "spec.dscp must be Copy, Clear, or a number from 0 to 63",
        ),
        Case(
            vpc("dscp", json!("46")),
            "spec.dscp must be Copy, Clear, or a number from 0 to 63",
        ),
        Case(vpc("deniedTraffic", json!("Refuse")), "spec.deniedTraffic"),
        Case(
            vpc("autoscale", json!({"maxDividers": 9})),
            "spec.autoscale.maxDividers in body should be less than or equal to 8",
        ),
        Case(
            vpc("autoscale", json!({})),
            "spec.autoscale.maxDividers: Required value",
        ),
        Case(
            vpc("autoscale", json!({"maxDividers": 2, "packetsPerSecond": 0})),
            "spec.autoscale.packetsPerSecond",
        ),
        Case(
            object(
                "Vpc",
                "rule",
                json!({"cidrs": ["10.0.0.0/16"], "dividers": 3, "autoscale": most}),
            ),
            "spec.autoscale.maxDividers must be at least spec.dividers, the least number: raise it, or lower spec.dividers",
        ),
        Case(vpc("allowedNamespaces", json!("red")), "spec.allowedNamespaces"),
    ]
}

pub(super) fn networks() -> Vec<Case> {
    let good = json!({"vpc": "red", "cidrs": ["10.0.1.0/24"]});
    let network = |field: &str, value: Value| object("Network", "rule", with(good.clone(), field, value));
    vec![
        Case(
            object("Network", "red.web", good.clone()),
            "metadata.name must be a DNS label",
        ),
        Case(network("vpc", json!("")), "spec.vpc"),
        Case(network("cidrs", json!([])), "spec.cidrs must have 1 to 8 ranges"),
        Case(network("cidrs", json!(["10.0.1.0/31"])), "IPv4 of /30 or larger"),
        Case(
            network("cidrs", json!(["10.0.1.0/24", "fd00::/63"])),
            "spec.cidrs must be networks without host bits: IPv4 of /30 or larger, such as 10.0.1.0/24, or IPv6 of /64 to /120",
        ),
        Case(
            network("cidrs", json!(["fd00::/64", "10.0.1.0/24"])),
            "spec.cidrs must begin with an IPv4 range, which every network needs; put IPv6 ranges after it",
        ),
        Case(
            network("cidrs", json!(["10.0.1.0/24", "10.0.1.0/24"])),
            "spec.cidrs has a range twice",
        ),
        Case(
            network("bouncers", json!(0)),
            "spec.bouncers in body should be greater than or equal to 1",
        ),
        Case(
            network("bouncers", json!(9)),
            "spec.bouncers in body should be less than or equal to 8",
        ),
        Case(
            network("autoscale", json!({"maxBouncers": 9})),
            "spec.autoscale.maxBouncers in body should be less than or equal to 8",
        ),
        Case(
            network("autoscale", json!({"maxBouncers": 2, "endpointsPerBouncer": 0})),
            "spec.autoscale.endpointsPerBouncer",
        ),
        Case(
            object(
                "Network",
                "rule",
                json!({"vpc": "red", "cidrs": ["10.0.1.0/24"], "bouncers": 3, "autoscale": {"maxBouncers": 2}}),
            ),
            "spec.autoscale.maxBouncers must be at least spec.bouncers, the least number: raise it, or lower spec.bouncers",
        ),
        Case(
            network("bandwidth", json!({"defaultEgress": "10 Mbit"})),
            "spec.bandwidth.defaultEgress",
        ),
        Case(
            network("bandwidth", json!({"maxIngress": "999"})),
            "expected a quantity of bits per second between 1k and 1P, such as 100M",
        ),
        Case(
            network("bandwidth", json!({"maxEgress": "2P"})),
            "spec.bandwidth.maxEgress",
        ),
        Case(
            network("bandwidth", json!({"defaultEgress": "10M", "maxEgress": "9M"})),
            "spec.bandwidth.defaultEgress must be at most spec.bandwidth.maxEgress",
        ),
        Case(
            network("bandwidth", json!({"defaultIngress": "1.1G", "maxIngress": "1G"})),
            "spec.bandwidth.defaultIngress must be at most spec.bandwidth.maxIngress",
        ),
        Case(network("allowStaticIPs", json!("yes")), "spec.allowStaticIPs"),
    ]
}

pub(super) fn endpoints() -> Vec<Case> {
    let endpoint = |field: &str, value: Value| {
        object(
            "Endpoint",
            "rule",
            with(json!({"network": "red-web"}), field, value),
        )
    };
    let pod = json!({"name": "a", "uid": "b", "cniUid": "b"});
    let service = json!({"name": "a", "uid": "b"});
    let of_service = json!({"network": "red-web", "type": "Scaled", "serviceRef": service});
    let scaled =
        |field: &str, value: Value| object("Endpoint", "rule", with(of_service.clone(), field, value));
    let of_node = json!({"network": "red-web", "type": "Host", "droplet": "node-a"});
    let host = object("Endpoint", "rule", with(of_node, "podRef", pod.clone()));
    vec![
        Case(endpoint("network", json!("")), "spec.network"),
        Case(endpoint("type", json!("Sized")), "spec.type: Unsupported value"),
        Case(
            endpoint("type", json!("Scaled")),
            "spec.serviceRef and spec.type Scaled go together: the operator sets both for a Service, people leave both out",
        ),
        Case(
            endpoint("serviceRef", service.clone()),
            "spec.serviceRef and spec.type Scaled go together",
        ),
        Case(
            scaled("serviceRef", json!({"name": "", "uid": "b"})),
            "spec.serviceRef.name",
        ),
        Case(
            scaled("mac", json!("02:00:00:00:00:01")),
            "spec.podRef and spec.mac are of pods: leave them out of an Endpoint of type Scaled, which has its Service's addresses",
        ),
        Case(
            endpoint("addresses", json!(["10.0.1.300"])),
            "spec.addresses must be addresses such as 10.0.1.7 or fd00:1::7, without prefix length",
        ),
        Case(
            endpoint("addresses", json!(["10.0.1.7/24"])),
            "without prefix length",
        ),
        Case(
            endpoint("addresses", json!(["10.0.1.7", "10.0.1.8"])),
            "spec.addresses may have one address of each family, not two of one: make an Endpoint for each",
        ),
        Case(
            endpoint("addresses", json!(["10.0.1.7", "fd00::1", "fd00::2"])),
            "spec.addresses",
        ),
        Case(
            endpoint("claimed", json!(["banana"])),
            "spec.claimed must be IP addresses",
        ),
        Case(
            endpoint("mac", json!("01:00:5e:00:00:01")),
            "spec.mac must be a unicast MAC address, such as 02:00:00:00:00:01: six bytes, the first one even",
        ),
        Case(
            endpoint("mac", json!("02-00-00-00-00-01")),
            "spec.mac must be a unicast MAC address",
        ),
        Case(
            endpoint("mac", json!("00:00:00:00:00:00")),
            "spec.mac must be a unicast MAC address",
        ),
        Case(
            endpoint("mac", json!("02:54:68:75:62:61")),
            "spec.mac is the gateway's, 02:54:68:75:62:61: choose another one",
        ),
        Case(
            endpoint("podRef", pod),
            "spec.podRef and spec.droplet go together: the operator sets both, people leave both out",
        ),
        Case(
            endpoint("droplet", json!("node-a")),
            "spec.podRef and spec.droplet go together",
        ),
        Case(
            endpoint("type", json!("Host")),
            "spec.podRef and spec.droplet go together",
        ),
        Case(
            host,
            "spec.type Host is of nodes: the operator makes such Endpoints, people leave it out",
        ),
    ]
}

pub(super) fn roles_and_droplets() -> Vec<Case> {
    let droplet = json!({"node": "node-x", "ip": "10.9.0.1", "interface": "eth0", "mtu": 1500});
    let droplet =
        |field: &str, value: Value| object("Droplet", "node-x", with(droplet.clone(), field, value));
    vec![
        Case(
            object("Divider", "red-d8", json!({"vpc": "red"})),
            "metadata.name must be <spec.vpc>-d<number>, 0 to 7, such as red-d0",
        ),
        Case(
            object("Divider", "blue-d0", json!({"vpc": "red"})),
            "metadata.name must be <spec.vpc>-d",
        ),
        Case(
            object("Divider", "red-d0", json!({"vpc": "red", "droplet": ""})),
            "spec.droplet",
        ),
        Case(
            object(
                "Bouncer",
                "red-web-d0",
                json!({"vpc": "red", "network": "red-web"}),
            ),
            "metadata.name must be <spec.network>-b<number>, 0 to 7, such as red-web-b0",
        ),
        Case(
            object(
                "Bouncer",
                "red-web-b00",
                json!({"vpc": "red", "network": "red-web"}),
            ),
            "metadata.name must be <spec.network>-b<number>",
        ),
        Case(
            droplet("node", json!("node-y")),
            "spec.node must be metadata.name: a Droplet is named as its Node",
        ),
        Case(
            droplet("ip", json!("fd00::1")),
            "spec.ip must be a unicast IPv4 address, one of the Node's InternalIPs",
        ),
        Case(
            droplet("ip", json!("127.0.0.1")),
            "spec.ip must be a unicast IPv4 address",
        ),
        Case(
            droplet("ip", json!("node-x")),
            "spec.ip must be a unicast IPv4 address",
        ),
        Case(
            droplet("interface", json!("a-link-of-16-chars")),
            "spec.interface",
        ),
        Case(
            droplet("mtu", json!(600)),
            "spec.mtu must be 626 to 65535 bytes: pods get 50 less, and IPv4 needs 576; raise the MTU of spec.interface",
        ),
        Case(
            droplet("mtu", json!(70000)),
            "spec.mtu must be 626 to 65535 bytes",
        ),
        Case(
            droplet("transitHook", json!("dpdk")),
            "spec.transitHook must be xdp or tc",
        ),
        Case(
            droplet("agentHook", json!("dpdk")),
            "spec.agentHook must be xdp or tc",
        ),
        Case(
            droplet("limitQueue", json!("cake")),
            "spec.limitQueue must be fq_codel or fifo",
        ),
    ]
}

pub(super) fn claims() -> Vec<Case> {
    let claim = |name: &str, address: &str| {
        let spec = json!({"vpc": "red", "network": "red-web", "address": address,
                          "endpointNamespace": "red", "endpointName": "a", "ownerUid": "b"});
        object("IpClaim", name, spec)
    };
    vec![
        Case(
            claim("red.10.0.1.8", "10.0.1.9"),
            "metadata.name must be <spec.vpc>.<spec.address>, IPv6 as 32 hex digits, such as red.10.0.1.2",
        ),
        Case(
            claim("blue.10.0.1.9", "10.0.1.9"),
            "metadata.name must be <spec.vpc>.<spec.address>",
        ),
        Case(claim("red.fd00--9", "fd00::9"), "IPv6 as 32 hex digits"),
        Case(
            claim("red.10.0.1.9", "fd00::0009"),
            "spec.address must be an IP address in its shortest form, such as 10.0.1.2 or fd00::2",
        ),
        Case(
            claim("red.10.0.1.9", "10.0.1"),
            "spec.address must be an IP address",
        ),
        Case(
            object("VniClaim", "16777216", json!({"vpc": "red", "vpcUid": "a"})),
            "metadata.name must be the VNI, a number from 1 to 16777215",
        ),
        Case(
            object("VniClaim", "red", json!({"vpc": "red", "vpcUid": "a"})),
            "metadata.name must be the VNI",
        ),
        Case(
            object("VniClaim", "7", json!({"vpc": "", "vpcUid": "a"})),
            "spec.vpc",
        ),
    ]
}

pub(super) fn path_traces() -> Vec<Case> {
    let trace = |target: Value| {
        object(
            "PathTrace",
            "rule",
            json!({"source": {"pod": "a"}, "target": target}),
        )
    };
    vec![
        Case(
            trace(json!({"pod": {"name": "b"}, "address": "10.0.2.4"})),
            "spec.target must have exactly one of pod, service and address",
        ),
        Case(
            trace(json!({"address": "10.0.2.0/24"})),
            "spec.target.address must be an address such as 10.0.2.4 or fd00:2::4, without prefix length, and none of \
             loopback, link-local or multicast",
        ),
    ]
}
