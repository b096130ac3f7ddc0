use k8s_openapi::api::core::v1::{Service, ServicePort};
use serde_json::{Value, json};
use thuban_api::{PoolDriver, Vip, VipProfileSpec};

use super::{Found, Refusal, derive, keeps_addresses};
use crate::driver;

fn vip(spec: &Value) -> Vip {
    let mut vip = json!({
        "apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
        "metadata": {"name": "shop", "namespace": "red", "uid": "v1"}, "spec": {"service": "web"},
    });
    for (field, value) in spec.as_object().unwrap() {
        vip["spec"][field] = value.clone();
    }
    serde_json::from_value(vip).unwrap()
}

/// Returns a Service as the API server has it.
fn web() -> Value {
    json!({
        "metadata": {"name": "web", "namespace": "red", "uid": "s1"},
        "spec": {
            "type": "ClusterIP", "clusterIP": "10.96.0.7", "selector": {"app": "web"}, "ipFamilies": ["IPv4"],
            "ports": [
                {"name": "https", "port": 443, "protocol": "TCP", "targetPort": "tls", "nodePort": 30443},
                {"name": "quic", "port": 443, "protocol": "UDP", "targetPort": 8443, "appProtocol": "h3"},
                {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080},
            ],
        },
    })
}

fn read(service: &Value) -> Service {
    serde_json::from_value(service.clone()).unwrap()
}

fn found(source: &Value, existing: Option<Service>) -> Found {
    let profile = |value| serde_json::from_value::<VipProfileSpec>(value).unwrap();
    let profiles = [
        ("office", json!({"sourceRanges": ["198.51.100.0/24"]})),
        ("sticky", json!({"affinitySeconds": 60})),
        (
            "later",
            json!({"affinitySeconds": 90, "sourceRanges": ["192.0.2.0/24"]}),
        ),
        ("tls", json!({"ssl": {"secret": "shop-tls"}})),
        (
            "new-tls",
            json!({"ssl": {"secret": "shop-tls-2", "minVersion": "TLS1.3"}}),
        ),
        ("limits", json!({"clientLimits": {"perClient": 9}})),
    ];
    Found {
        source: Some(read(source)),
        existing,
        profiles: profiles
            .map(|(name, value)| (name.to_owned(), profile(value)))
            .into(),
        ..Found::default()
    }
}

fn derived(spec: &Value, source: &Value, existing: Option<Service>) -> Result<Value, Refusal> {
    let service = derive(&vip(spec), &found(source, existing))?;
    Ok(serde_json::to_value(service).unwrap())
}

fn refused(spec: &Value, source: &Value, existing: Option<Service>) -> (&'static str, String) {
    let said = derived(spec, source, existing).unwrap_err().said();
    (said.1, said.2)
}

#[test]
fn a_vip_gets_a_service_of_its_name() {
    let mut source = web();
    source["metadata"]["annotations"] =
        json!({"thuban.dev/network": "red-web", "thuban.dev/service-ip": "10.0.0.9"});
    source["spec"]["publishNotReadyAddresses"] = json!(true);
    source["spec"]["externalTrafficPolicy"] = json!("Local");
    let spec = json!({"mode": "Node", "ports": [{"port": 443, "protocol": "UDP"}, {"port": 80}]});
    let expected = json!({
        "apiVersion": "v1", "kind": "Service",
        "metadata": {
            "name": "shop", "namespace": "red",
            "annotations": {"thuban.dev/load-balancer-mode": "Node", "thuban.dev/network": "red-web"},
            "ownerReferences": [{"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip", "name": "shop", "uid": "v1",
                "controller": true}],
        },
        "spec": {
            "type": "LoadBalancer", "loadBalancerClass": "thuban.dev/vip", "allocateLoadBalancerNodePorts": false,
            "selector": {"app": "web"}, "ipFamilies": ["IPv4"], "ipFamilyPolicy": "SingleStack",
            "publishNotReadyAddresses": true, "externalTrafficPolicy": "Local", "sessionAffinity": "None",
            "ports": [
                {"name": "quic", "port": 443, "protocol": "UDP", "targetPort": 8443, "appProtocol": "h3"},
                {"name": "http", "port": 80, "protocol": "TCP", "targetPort": 8080},
            ],
        },
    });
    assert_eq!(derived(&spec, &source, None), Ok(expected));
    let all = derived(&json!({}), &web(), None).unwrap();
    assert_eq!(all["spec"]["ports"].as_array().unwrap().len(), 3);
    assert_eq!(all["spec"]["ports"][0].get("nodePort"), None);
}

#[test]
fn a_service_follows_and_is_written_once() {
    let first = derive(&vip(&json!({})), &found(&web(), None)).unwrap();
    // What the API server and others add stays.
    let mut has = serde_json::to_value(&first).unwrap();
    has["metadata"]["annotations"]["example.org/team"] = json!("red");
    has["spec"]["clusterIP"] = json!("10.96.0.8");
    let has = read(&has);
    let again = |spec: &Value, source: &Value, has: &Service| {
        derive(&vip(spec), &found(source, Some(has.clone()))).unwrap()
    };
    assert_eq!(again(&json!({}), &web(), &has), has);
    let mut changed = web();
    changed["spec"]["selector"] = json!({"app": "other"});
    let follows = again(&json!({}), &changed, &has);
    assert_ne!(follows, has);
    assert_eq!(
        follows.spec.as_ref().unwrap().cluster_ip.as_deref(),
        Some("10.96.0.8")
    );
    let profiles = json!({"profiles": ["office", "sticky"]});
    let limited = again(&profiles, &web(), &has);
    assert_eq!(again(&json!({}), &web(), &limited), has, "no trace of profiles");
    let mut elsewhere = web();
    elsewhere["metadata"]["annotations"] = json!({"thuban.dev/network": "red-web"});
    let moved = again(&json!({}), &elsewhere, &has);
    assert_ne!(moved, has);
    assert_eq!(again(&json!({}), &web(), &moved), has, "no trace of the network");
    let check = json!({"healthCheck": {"type": "HTTP", "port": 8080, "path": "/ready"}});
    let checked = again(&check, &web(), &has);
    let text = &checked.metadata.annotations.as_ref().unwrap()["thuban.dev/health-check"];
    let told = thuban_api::HealthCheck::of_annotation(text).unwrap();
    assert_eq!(told.get_path(), Some("/ready"));
    assert_eq!(again(&check, &web(), &checked), checked);
    assert_eq!(again(&json!({}), &web(), &checked), has, "no trace of the check");
    // Somebody edits it.
    let mut edited = has.clone();
    edited.spec.as_mut().unwrap().load_balancer_class = None;
    assert_eq!(again(&json!({}), &web(), &edited), has);
}

#[test]
fn the_later_profile_counts() {
    let treated = |profiles: &Value| {
        let spec = derived(&json!({"profiles": profiles}), &web(), None).unwrap()["spec"].take();
        let affinity = spec["sessionAffinityConfig"]["clientIP"]["timeoutSeconds"].clone();
        assert_eq!(spec["sessionAffinity"] == "ClientIP", !affinity.is_null());
        (spec["loadBalancerSourceRanges"].clone(), affinity)
    };
    assert_eq!(treated(&json!([])), (Value::Null, Value::Null));
    assert_eq!(
        treated(&json!(["sticky", "office"])),
        (json!(["198.51.100.0/24"]), json!(60))
    );
    assert_eq!(
        treated(&json!(["sticky", "later"])),
        (json!(["192.0.2.0/24"]), json!(90))
    );
    assert_eq!(
        treated(&json!(["later", "office", "sticky"])),
        (json!(["198.51.100.0/24"]), json!(60))
    );
}

#[test]
fn a_services_first_family_stays() {
    let mut dual = web();
    dual["spec"]["ipFamilies"] = json!(["IPv4", "IPv6"]);
    let first = derive(&vip(&json!({})), &found(&dual, None)).unwrap();
    let grown = derived(&json!({"ipFamilies": ["IPv6", "IPv4"]}), &dual, Some(first)).unwrap();
    assert_eq!(grown["spec"]["ipFamilies"], json!(["IPv4", "IPv6"]));
    assert_eq!(grown["spec"]["ipFamilyPolicy"], "RequireDualStack");
    let new = derived(&json!({"ipFamilies": ["IPv6", "IPv4"]}), &dual, None).unwrap();
    assert_eq!(new["spec"]["ipFamilies"], json!(["IPv6", "IPv4"]));
}

#[test]
fn refusals_name_the_field_and_the_remedy() {
    let none = json!({});
    let missing = derive(&vip(&none), &Found::default()).unwrap_err().said();
    assert_eq!(missing.1, "ServiceNotFound");
    let mut unselective = web();
    unselective["spec"]["selector"] = Value::Null;
    assert_eq!(refused(&none, &unselective, None).0, "NoSelector");
    let mut external = web();
    external["spec"]["type"] = json!("ExternalName");
    assert_eq!(refused(&none, &external, None).0, "NoSelector");
    let (reason, message) = refused(&json!({"ports": [{"port": 80, "protocol": "UDP"}]}), &web(), None);
    assert_eq!(reason, "PortNotFound");
    assert_eq!(
        message,
        "spec.ports: Service web has no port 80/UDP: name some of 443/TCP, 443/UDP, 80/TCP"
    );
    let mut portless = web();
    portless["spec"]["ports"] = json!([]);
    assert_eq!(refused(&none, &portless, None).0, "PortNotFound");
    let (reason, message) = refused(&json!({"profiles": ["office", "lost"]}), &web(), None);
    assert_eq!(reason, "ProfileNotFound");
    assert_eq!(
        message,
        "spec.profiles: there is no VipProfile lost in the namespace: make it"
    );
    let (reason, message) = refused(&json!({"ipFamilies": ["IPv4", "IPv6"]}), &web(), None);
    assert_eq!(reason, "FamilyNotServed");
    assert!(message.contains("web has no IPv6"), "{message}");
}

#[test]
fn anothers_service_is_left_alone() {
    let none = json!({});
    let (reason, message) = refused(&none, &web(), Some(read(&web())));
    assert_eq!(reason, "NameTaken");
    assert!(message.contains("give the Vip another name"), "{message}");
    let own = derive(&vip(&none), &found(&web(), None)).unwrap();
    let with = |path: &str, value: Value| {
        let mut other = serde_json::to_value(&own).unwrap();
        *other.pointer_mut(path).unwrap() = value;
        read(&other)
    };
    assert!(derived(&none, &web(), Some(own.clone())).is_ok());
    for (path, value) in [
        ("/metadata/ownerReferences/0/uid", json!("v2")),
        ("/metadata/ownerReferences/0/controller", json!(false)),
        ("/metadata/ownerReferences/0/kind", json!("Vpc")),
        ("/metadata/ownerReferences/0/apiVersion", json!("example.org/v1")),
    ] {
        assert_eq!(
            refused(&none, &web(), Some(with(path, value))).0,
            "NameTaken",
            "{path}"
        );
    }
    // No Vip follows from the Service of another.
    let derived_source = serde_json::to_value(&own).unwrap();
    assert_eq!(refused(&none, &derived_source, None).0, "ServiceIsDerived");
    assert_eq!(refused(&none, &derived_source, Some(own)).0, "ServiceIsDerived");
}

#[test]
fn a_private_vips_service_has_its_addresses_in_its_vpc() {
    let private = |vip: &Vip, existing| {
        let found = Found {
            is_private: true,
            ..found(&web(), existing)
        };
        derive(vip, &found)
    };
    let mut vip = vip(&json!({"mode": "Node"}));
    vip.status = serde_json::from_value(json!({"addresses": ["10.7.0.9"], "vpc": "red"})).unwrap();
    let service = serde_json::to_value(private(&vip, None).unwrap()).unwrap();
    assert_eq!(
        service["metadata"]["annotations"],
        json!({"thuban.dev/service-ip": "10.7.0.9"})
    );
    assert_eq!(service["spec"]["type"], "ClusterIP");
    let of_balancers = [
        "loadBalancerClass",
        "allocateLoadBalancerNodePorts",
        "externalTrafficPolicy",
    ];
    for field in of_balancers {
        assert_eq!(service["spec"].get(field), None, "{field}");
    }
    let read = private(&vip, None).unwrap();
    assert_eq!(private(&vip, Some(read.clone())), Ok(read), "written once");
    vip.spec.profiles = vec!["office".to_owned()];
    assert_eq!(private(&vip, None), Err(Refusal::SourceRangesNotServed));
}

#[test]
fn a_service_that_outlives_its_vip_keeps_the_addresses() {
    let mut deleted = vip(&json!({}));
    deleted.metadata.finalizers = Some(vec!["thuban.dev/vip".into()]);
    deleted.status = serde_json::from_value(json!({"addresses": ["10.0.9.3"], "vpc": "red"})).unwrap();
    let service = |owner: Option<&str>, addresses: &str| {
        let mut service = web();
        service["metadata"]["name"] = json!("shop");
        service["metadata"]["annotations"] = json!({"thuban.dev/service-ip": addresses});
        if let Some(uid) = owner {
            service["metadata"]["ownerReferences"] = json!([{"apiVersion": "thuban.dev/v1alpha1", "kind": "Vip",
                "name": "shop", "uid": uid, "controller": true}]);
        }
        read(&service)
    };
    let own = service(Some("v1"), "10.0.9.3");
    assert!(
        !keeps_addresses(&own, &deleted),
        "the garbage collector deletes it"
    );
    let nobodys = service(None, "10.0.9.3");
    assert!(keeps_addresses(&nobodys, &deleted));
    assert!(!keeps_addresses(&service(None, "10.0.1.1"), &deleted), "its own");
    let mut goes = nobodys.clone();
    goes.metadata.deletion_timestamp = serde_json::from_value(json!("2026-01-01T00:00:00Z")).unwrap();
    assert!(!keeps_addresses(&goes, &deleted));
    let mut orphaning = deleted.clone();
    orphaning
        .metadata
        .finalizers
        .as_mut()
        .unwrap()
        .push("orphan".into());
    assert!(keeps_addresses(&own, &orphaning), "it is to stay");
    assert!(
        !keeps_addresses(&service(Some("v2"), "10.0.9.3"), &orphaning),
        "another Vip's"
    );
    let mut public = deleted;
    public.status.as_mut().unwrap().vpc.clear();
    assert!(!keeps_addresses(&nobodys, &public));
}

/// Returns the Service of a Vip whose pool has the driver Haproxy.
fn by_haproxy(spec: &Value, existing: Option<Service>) -> Result<Service, Refusal> {
    let found = Found {
        driver: PoolDriver::Haproxy,
        ..found(&web(), existing)
    };
    derive(&vip(spec), &found)
}

#[test]
fn haproxy_gets_node_ports_that_lead_to_the_nodes_own_pods() {
    let spec = json!({"ports": [{"port": 443}, {"port": 80}], "profiles": ["tls", "sticky", "new-tls"]});
    let first = by_haproxy(&spec, None).unwrap();
    let told = serde_json::to_value(&first).unwrap();
    assert_eq!(told["metadata"]["labels"]["thuban.dev/driver"], "Haproxy");
    assert_eq!(told["spec"]["allocateLoadBalancerNodePorts"], true);
    assert_eq!(told["spec"]["externalTrafficPolicy"], "Local");
    assert_eq!(told["spec"]["sessionAffinity"], "None", "nodes see nodes alone");
    assert_eq!(
        told["spec"]["ports"][0].get("nodePort"),
        None,
        "the API server chooses"
    );
    let treatment = crate::driver::treatment_of(&first).unwrap();
    assert_eq!(treatment.ssl.unwrap().secret, "shop-tls-2");
    assert_eq!(treatment.affinity_seconds, Some(60));
    let mut has = told;
    has["spec"]["ports"][0]["nodePort"] = json!(31443);
    has["spec"]["ports"][1]["nodePort"] = json!(31080);
    let has = read(&has);
    assert_eq!(
        by_haproxy(&spec, Some(has.clone())),
        Ok(has.clone()),
        "written once"
    );
    let fewer = json!({"ports": [{"port": 80}]});
    let fewer = by_haproxy(&fewer, Some(has)).unwrap();
    assert_eq!(fewer.spec.unwrap().ports.unwrap()[0].node_port, Some(31080));
}

#[test]
fn each_driver_refuses_what_it_does_not_serve() {
    let refusal = by_haproxy(&json!({}), None).unwrap_err().said();
    assert_eq!(refusal.1, "ProtocolNotServed");
    assert!(refusal.2.contains("443/UDP"), "{}", refusal.2);
    let ports = |count: usize| -> Vec<_> {
        let port = |number: usize| ServicePort {
            port: i32::try_from(number).unwrap(),
            ..ServicePort::default()
        };
        (1..=count).map(port).collect()
    };
    let haproxy = driver::of(PoolDriver::Haproxy);
    let treatment = VipProfileSpec::default();
    assert!(haproxy.admit(&treatment, &ports(16)).is_ok());
    let refusal = haproxy.admit(&treatment, &ports(17)).unwrap_err().said();
    assert_eq!(refusal.1, "TooManyPorts");
    for (profile, field) in [("tls", "ssl"), ("limits", "clientLimits")] {
        let (reason, message) = refused(&json!({"profiles": [profile]}), &web(), None);
        assert_eq!(reason, "NeedsHaproxy");
        assert!(message.contains(field), "{message}");
    }
}
