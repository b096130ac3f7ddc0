//! Tests of what nodes and fronts are told of a Service's backends.

use std::net::IpAddr;

use serde_json::{Value, json};

use super::{
    Backend, Backends, EndpointSlice, Located, Place, Service, Target, TooLarge, WaysIn, backends, first,
    http, made, of_http, of_tenant, service, slice, ways,
};

#[test]
fn nodes_serve_outside_backends_and_leave_members_out() {
    let place_of = |address: IpAddr, _: Option<&Target>| match address.to_string().as_str() {
        "172.16.0.1" | "172.16.0.2" => Some(Place::Outside),
        "10.0.1.2" => Some(Place::Member),
        _ => None,
    };
    let made = |addresses: &[&str]| {
        let endpoints = addresses.iter().map(|address| json!({"addresses": [address]}));
        let endpoints = Value::Array(endpoints.collect());
        let slices = [of_http(&endpoints)];
        backends(&http(), &http().cluster_ips(), &slices, place_of).unwrap()
    };
    let mixed = made(&["172.16.0.1", "10.0.1.2", "172.16.0.2", "192.0.2.9"]);
    assert!(mixed.by_node);
    assert_eq!(ways(&mixed), ["172.16.0.1:8080", "172.16.0.2:8080"]);
    assert_eq!((mixed.used, mixed.left_out), (2, 2));
    let within = made(&["10.0.1.2"]);
    assert!(!within.by_node);
    let many: Vec<String> = (0..1025_u32)
        .map(|host| std::net::Ipv4Addr::from_bits(0xac10_0100 + host).to_string())
        .collect();
    let endpoints: Vec<_> = many
        .iter()
        .map(|address| json!({"addresses": [address]}))
        .collect();
    let slices = [of_http(&Value::Array(endpoints))];
    let place_of = |_: IpAddr, _: Option<&Target>| Some(Place::Outside);
    let refused = backends(&http(), &http().cluster_ips(), &slices, place_of);
    assert_eq!(refused, Err(TooLarge::ByNode(1025)));
    assert_eq!(
        (ways(&within), within.left_out),
        (vec!["10.0.1.2:8080".to_owned()], 0)
    );
}

#[test]
fn nothing_leads_to_the_overlays_port_outside_of_the_vpc() {
    let ports = json!([
        {"name": "a", "protocol": "UDP", "port": 53, "nodePort": 6081},
        {"name": "b", "protocol": "TCP", "port": 54, "nodePort": 6081},
    ]);
    let mut service = service(&ports);
    let at = |port: u16| {
        let ports = json!([{"name": "a", "protocol": "UDP", "port": port}, {"name": "b", "protocol": "TCP", "port": port}]);
        [slice(&ports, &json!([{"addresses": ["172.16.0.1"]}]))]
    };
    let made = |service: &Service, port, place| {
        let place_of = move |_: IpAddr, _: Option<&Target>| Some(place);
        backends(service, &service.cluster_ips(), &at(port), place_of).unwrap()
    };
    let by_port = |made: &Backends| {
        first(made)
            .into_iter()
            .map(|(_, _, ways)| ways.len())
            .collect::<Vec<_>>()
    };
    let refused = made(&service, 6081, Place::Outside);
    assert_eq!(
        (by_port(&refused), refused.by_node),
        (vec![0, 1], true),
        "TCP alone"
    );
    assert!(refused.uses_overlay_port);
    // Within a VPC the port is like any other.
    let within = made(&service, 6081, Place::Member);
    assert_eq!(by_port(&within), [1, 1]);
    service.spec.as_mut().unwrap().kind = Some("NodePort".into());
    let node_ports = |made: &Backends| {
        let ports = made.exposed[0].1.iter();
        ports
            .map(|port| port.node_port.unwrap_or_default())
            .collect::<Vec<_>>()
    };
    let exposed = made(&service, 8080, Place::Member);
    assert_eq!(
        (node_ports(&exposed), exposed.uses_overlay_port),
        (vec![0, 6081], true)
    );
    service.spec.as_mut().unwrap().ports.as_mut().unwrap()[0].node_port = Some(30053);
    let other = made(&service, 8080, Place::Outside);
    assert_eq!((by_port(&other), other.uses_overlay_port), (vec![1, 1], false));
    // A backend that isn't ready now will be soon, and a port that the Service doesn't have belongs to nobody.
    let unready = json!([{"addresses": ["172.16.0.1"], "conditions": {"ready": false}}]);
    for (name, is_told) in [("a", true), ("c", false)] {
        let slices = [slice(
            &json!([{"name": name, "protocol": "UDP", "port": 6081}]),
            &unready,
        )];
        let outside = |_: IpAddr, _: Option<&Target>| Some(Place::Outside);
        let made = backends(&service, &service.cluster_ips(), &slices, outside).unwrap();
        assert_eq!(made.uses_overlay_port, is_told, "port {name}");
    }
}

#[test]
fn nodes_expose_service_ports_except_the_overlay_port() {
    let service = service(&json!([
        {"name": "a", "protocol": "UDP", "port": 6081}, {"name": "b", "protocol": "TCP", "port": 443},
    ]));
    let ports = json!([{"name": "a", "protocol": "UDP", "port": 5000}, {"name": "b", "protocol": "TCP", "port": 5000}]);
    let slices = [slice(&ports, &json!([{"addresses": ["10.0.1.2"]}]))];
    let outside = ["172.16.0.9".parse().unwrap()];
    let made = |at_droplets, place| {
        let locate = |_: IpAddr, _: &Backend| Some(Located { place, droplet: None });
        let ways_in = WaysIn {
            outside: &outside,
            at_droplets,
            ..WaysIn::default()
        };
        super::super::backends(&service, &service.cluster_ips(), ways_in, &slices, locate).unwrap()
    };
    let exposed = |made: &Backends| made.exposed[0].1.iter().map(|port| port.port).collect::<Vec<_>>();
    let elsewhere = made(false, Place::Member);
    assert_eq!(
        (exposed(&elsewhere), elsewhere.uses_overlay_port),
        (vec![6081, 443], false)
    );
    let at_droplets = made(true, Place::Member);
    assert_eq!(
        (exposed(&at_droplets), at_droplets.uses_overlay_port),
        (vec![443], true)
    );
    // Agents drop packets of pods to it.
    assert!(made(false, Place::Outside).uses_overlay_port);
}

#[test]
fn nodes_choose_for_clients_that_keep_backends_anywhere() {
    let many = |count: u32| {
        let each =
            (0..count).map(|number| json!({"addresses": [format!("10.0.{}.{}", number >> 8, number & 255)]}));
        [of_http(&Value::Array(each.collect()))]
    };
    let exposed = |asked: &Value, slices: &[EndpointSlice]| {
        let mut value = serde_json::to_value(http()).unwrap();
        for (field, asked) in asked.as_object().unwrap() {
            value["spec"][field] = asked.clone();
        }
        let service: Service = serde_json::from_value(value).unwrap();
        let made = made(&service, slices);
        let port = &made.exposed[0].1[0];
        (port.affinity, port.members.len(), port.local.is_some())
    };
    let asked = json!({"type": "NodePort", "sessionAffinity": "ClientIP"});
    assert_eq!(exposed(&asked, &many(3)), (10_800, 3, false));
    assert_eq!(exposed(&asked, &many(1024)), (10_800, 1024, false));
    assert_eq!(
        exposed(&asked, &many(1025)),
        (10_800, 0, false),
        "too many for a node"
    );
    assert_eq!(exposed(&json!({"type": "NodePort"}), &many(3)), (0, 0, false));
    let mut local = asked;
    local["externalTrafficPolicy"] = "Local".into();
    assert_eq!(exposed(&local, &many(3)), (10_800, 0, true));
    let http: Service = {
        let mut value = serde_json::to_value(http()).unwrap();
        value["spec"]["type"] = "NodePort".into();
        value["spec"]["sessionAffinity"] = "ClientIP".into();
        serde_json::from_value(value).unwrap()
    };
    let outside = backends(&http, &http.cluster_ips(), &many(3), |_, _| Some(Place::Outside)).unwrap();
    assert!(outside.exposed[0].1[0].members.is_empty(), "nodes know them");
    assert_eq!(of_tenant(&http, &many(3)).exposed[0].1[0].affinity, 10_800);
    // One that ends is used only if there is no other.
    let ending = json!({"addresses": ["10.0.1.9"], "conditions": {"ready": false, "serving": true}});
    let both = of_http(&json!([{"addresses": ["10.0.1.2"]}, ending]));
    assert_eq!(made(&http, &[both]).exposed[0].1[0].members.len(), 1);
}

#[test]
fn traffic_that_stays_on_its_node_has_the_best_backends_of_each() {
    let with = |fields: &Value| {
        let mut value = serde_json::to_value(http()).unwrap();
        for (field, asked) in fields.as_object().unwrap() {
            value["spec"][field] = asked.clone();
        }
        serde_json::from_value::<Service>(value).unwrap()
    };
    let on = |node: &str, host: u8, ready: bool| {
        json!({"addresses": [format!("10.0.1.{host}")], "nodeName": node,
               "conditions": {"ready": ready, "serving": true, "terminating": !ready}})
    };
    let nowhere = json!({"addresses": ["10.0.1.9"]});
    // No backend on node b is ready: those that end still serve.
    let slices = [of_http(&json!([
        on("a", 2, true),
        on("a", 3, false),
        on("b", 4, false),
        nowhere
    ]))];
    let cluster = made(&with(&json!({})), &slices);
    assert_eq!(ways(&cluster), ["10.0.1.2:8080", "10.0.1.9:8080"]);
    assert!(cluster.homes.is_empty() && !cluster.tables[0].1[0].local);
    let internal = made(&with(&json!({"internalTrafficPolicy": "Local"})), &slices);
    assert_eq!(ways(&internal), ["10.0.1.2:8080", "10.0.1.4:8080"]);
    assert!(internal.tables[0].1[0].local && internal.exposed.is_empty());
    assert_eq!(internal.homes[&"10.0.1.4".parse::<IpAddr>().unwrap()], "b");
    // Without any backend new connections are refused everywhere.
    let none = made(&with(&json!({"internalTrafficPolicy": "Local"})), &[]);
    assert!(!none.tables[0].1[0].local);
    let outside = json!({"type": "NodePort", "externalTrafficPolicy": "Local",
                         "ports": [{"name": "http", "port": 80, "nodePort": 30080}]});
    let outside = made(&with(&outside), &slices);
    assert_eq!(ways(&outside), ways(&cluster), "pods reach all");
    let port = &outside.exposed[0].1[0];
    assert_eq!(port.node_port, Some(30080));
    let local = &internal.tables[0].1[0].backends;
    assert_eq!(port.local.as_ref(), Some(local));
    assert_eq!(port.ending, [local.last().unwrap().address].into());
    assert!(outside.by_peers, "for processes of nodes without a backend");
    let open = json!({"type": "NodePort", "ports": [{"name": "http", "port": 80, "nodePort": 30080}]});
    let open = with(&open);
    let tenants = of_tenant(&open, &slices);
    let open = made(&open, &slices);
    assert!(open.exposed[0].1[0].local.is_none() && !open.by_peers);
    // Of another VPC's Service each node is told its own backends.
    let port = &tenants.exposed[0].1[0];
    assert!(tenants.by_peers && !tenants.tables[0].1[0].local);
    assert_eq!(port.local.as_ref(), Some(local));
    assert_eq!(port.ending, [local.last().unwrap().address].into());
    assert_eq!(ways(&tenants), ways(&open));
    // If a node has very many backends, the first ones of each port are used: the Service is served all the same.
    let crowd = (0..1100).map(|number: u16| {
        let [high, low] = number.to_be_bytes();
        json!({"addresses": [format!("10.0.{}.{low}", 8 + high)], "nodeName": "a"})
    });
    let crowd: Vec<_> = crowd.collect();
    let ports = [("http", 80), ("more", 81)]
        .map(|(name, port)| json!({"name": name, "port": port, "nodePort": 30000 + port}));
    let wide = with(&json!({"type": "NodePort", "ports": ports}));
    let ports = json!([{"name": "http", "protocol": "TCP", "port": 8080}, {"name": "more", "protocol": "TCP", "port": 81}]);
    let crowd = of_tenant(&wide, &[slice(&ports, &json!(crowd))]);
    for port in 0..2 {
        assert_eq!(crowd.exposed[0].1[port].local.as_ref().unwrap().len(), 512);
        assert_eq!(crowd.tables[0].1[port].backends.len(), 1100);
    }
}

#[test]
fn a_front_has_all_backends_unless_traffic_stays_on_its_node() {
    let front: IpAddr = "203.0.113.1".parse().unwrap();
    let fronted = |status: &str, policy: &str| -> Service {
        serde_json::from_value(json!({
            "metadata": {"name": "web"},
            "spec": {"type": "LoadBalancer", "clusterIPs": ["10.96.0.10"], "externalTrafficPolicy": policy,
                "internalTrafficPolicy": "Local",
                "ports": [{"name": "http", "port": 80, "nodePort": 30080}]},
            "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.1", "ipMode": "VIP"}]},
                "conditions": [{"type": "thuban.dev/Front", "status": status, "reason": "Dsr", "message": "",
                    "lastTransitionTime": "2026-11-27T00:00:00Z"}]},
        }))
        .unwrap()
    };
    let slices = [of_http(&json!([
        {"addresses": ["10.0.1.2"], "nodeName": "a"}, {"addresses": ["10.0.1.3"], "nodeName": "b"},
        {"addresses": ["10.0.1.4"], "nodeName": "b", "conditions": {"ready": false}},
    ]))];
    let made = |service: &Service, place: Place, at_droplets| {
        let locate = |_: IpAddr, backend: &Backend| {
            let droplet = backend.node_name.clone();
            Some(Located { place, droplet })
        };
        let fronts = service.fronts();
        let ways_in = WaysIn {
            outside: &service.balancers(),
            fronts: &fronts,
            at_droplets,
            is_tenants: true,
        };
        super::super::backends(service, &service.cluster_ips(), ways_in, &slices, locate).unwrap()
    };
    let service = fronted("True", "Cluster");
    let usual = made(&service, Place::Member, false);
    let [(address, ports)] = &usual.fronts[..] else {
        panic!("{:?}", usual.fronts)
    };
    assert_eq!(
        (*address, ports.len(), ports[0].port, ports[0].local),
        (front, 1, 80, false)
    );
    let backends: Vec<String> = ports[0]
        .backends
        .iter()
        .map(|backend| backend.address.to_string())
        .collect();
    assert_eq!(backends, ["10.0.1.2", "10.0.1.3"]);
    assert!(!service.is_front_tunnel());
    assert_eq!(usual.homes.len(), 2, "of the ready ones");
    assert!(
        !usual.exposed.is_empty(),
        "the node's own processes go by its stack"
    );
    for (service, place, at_droplets) in [
        (fronted("False", "Cluster"), Place::Member, false),
        (fronted("True", "Local"), Place::Member, false),
        (fronted("True", "Cluster"), Place::Outside, false),
        (fronted("True", "Cluster"), Place::Member, true),
    ] {
        assert_eq!(made(&service, place, at_droplets).fronts, []);
    }
}
