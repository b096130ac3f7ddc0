use std::collections::BTreeMap;

use serde_json::{Value, json};
use thuban_api::DnsZone;

use super::choose;

fn zone(name: &str, more: &Value) -> DnsZone {
    let mut zone = json!({"apiVersion": "thuban.dev/v1alpha1", "kind": "DnsZone", "metadata": {"name": name},
        "spec": {"zone": "apps.example.com", "allowedNamespaces": {}, "names": "Namespace",
            "rfc2136": {"server": "192.0.2.53:53", "secret": "key"}}});
    for (field, value) in more.as_object().unwrap() {
        zone["spec"][field] = value.clone();
    }
    serde_json::from_value(zone).unwrap()
}

fn chosen(zones: &[DnsZone], name: &str) -> Option<String> {
    let labels = BTreeMap::from([("tier".to_owned(), "gold".to_owned())]);
    choose(zones, name, "red", &labels)?.metadata.name.clone()
}

#[test]
fn a_namespace_has_names_below_its_own() {
    let zones = [zone("apps", &json!({}))];
    for name in ["shop.red.apps.example.com", "a.b.red.apps.example.com"] {
        assert_eq!(chosen(&zones, name).as_deref(), Some("apps"), "{name}");
    }
    for name in [
        "red.apps.example.com",
        "shop.blue.apps.example.com",
        "shop.notred.apps.example.com",
        "shop.red.blue.apps.example.com",
        "shop-red.apps.example.com",
        "shop.apps.example.com",
        "apps.example.com",
        "shop.red.myapps.example.com",
        "shop.red.example.com",
        ".red.apps.example.com",
    ] {
        assert_eq!(chosen(&zones, name), None, "{name}");
    }
}

#[test]
fn a_zone_of_any_names_has_all_but_its_own() {
    let zones = [zone("apps", &json!({"names": "Any"}))];
    for name in ["shop.apps.example.com", "x.blue.apps.example.com"] {
        assert_eq!(chosen(&zones, name).as_deref(), Some("apps"), "{name}");
    }
    let long = format!("{}apps.example.com", "a.".repeat(30));
    for name in [
        "apps.example.com",
        "shop.example.com",
        "shopapps.example.com",
        &long,
    ] {
        assert_eq!(chosen(&zones, name), None, "{name}");
    }
}

#[test]
fn the_selector_admits_namespaces() {
    for (selector, expected) in [
        (json!(null), None),
        (json!({"matchLabels": {"tier": "iron"}}), None),
        (
            json!({"matchExpressions": [{"key": "tier", "operator": "Odd"}]}),
            None,
        ),
        (json!({"matchLabels": {"tier": "gold"}}), Some("apps")),
    ] {
        let zones = [zone("apps", &json!({"allowedNamespaces": selector}))];
        let found = chosen(&zones, "shop.red.apps.example.com");
        assert_eq!(found.as_deref(), expected, "{selector}");
    }
}

#[test]
fn the_longest_zone_that_admits_counts() {
    let outer = zone("outer", &json!({"zone": "example.com", "names": "Any"}));
    let inner = zone("z-inner", &json!({"names": "Any"}));
    let twin = zone("a-twin", &json!({"names": "Any"}));
    let closed = zone(
        "closed",
        &json!({"zone": "red.apps.example.com", "allowedNamespaces": null}),
    );
    let name = "shop.red.apps.example.com";
    assert_eq!(
        chosen(&[outer.clone(), inner.clone()], name).as_deref(),
        Some("z-inner")
    );
    assert_eq!(
        chosen(&[inner.clone(), outer.clone()], name).as_deref(),
        Some("z-inner")
    );
    assert_eq!(
        chosen(&[inner.clone(), twin.clone()], name).as_deref(),
        Some("a-twin")
    );
    assert_eq!(chosen(&[twin, inner.clone()], name).as_deref(), Some("a-twin"));
    assert_eq!(chosen(&[closed, outer, inner], name).as_deref(), Some("z-inner"));
}
