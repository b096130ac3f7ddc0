//! The CRDs in `install/` and in the chart are generated from the types of this crate, and committed.

#![allow(clippy::unwrap_used)] // a test

use serde_json::Value;

#[test]
fn the_committed_crds_are_current() {
    for (file, text) in thuban_api::manifests().unwrap() {
        let path = format!("{}/../{file}", env!("CARGO_MANIFEST_DIR"));
        let committed = std::fs::read_to_string(&path).unwrap();
        assert!(
            committed == text,
            "{path} is not what api/ says: run `cargo xtask crds` and commit it"
        );
    }
}

#[test]
fn kubectl_takes_no_item_of_a_list_for_a_boolean() {
    let manifests = thuban_api::manifests().unwrap();
    for line in manifests.values().flat_map(|text| text.lines()) {
        let item = line.trim().strip_prefix("- ").unwrap_or_default().to_lowercase();
        assert!(
            !["y", "yes", "on", "n", "no", "off"].contains(&item.as_str()),
            "{line}"
        );
    }
    assert!(manifests["install/10-crds.yaml"].contains("- \"NO\"\n"));
}

/// Yields each field below a schema that has no description.
fn undescribed(path: &str, schema: &Value) -> Vec<String> {
    let inner = |schema: &Value, path: &str| {
        let fields = schema["properties"].as_object().into_iter().flatten();
        fields
            .flat_map(|(name, field)| undescribed(&format!("{path}.{name}"), field))
            .collect::<Vec<_>>()
    };
    let own = schema["description"].as_str().is_none_or(str::is_empty);
    let own = own.then(|| path.to_owned());
    let parts = [schema, &schema["items"], &schema["additionalProperties"]];
    own.into_iter()
        .chain(parts.into_iter().flat_map(|part| inner(part, path)))
        .collect()
}

/// Conditions that say whether an object is as it is wanted, the best one first.
const SUMMARIES: [&str; 3] = ["Ready", "Provisioned", "Accepted"];

#[test]
fn kubectl_get_shows_how_each_object_with_conditions_is() {
    let mut kinds = 0;
    for crd in thuban_api::crds()
        .into_iter()
        .chain(thuban_api::load_balancer_crds())
    {
        let crd = serde_json::to_value(&crd).unwrap();
        let (kind, version) = (&crd["spec"]["names"]["kind"], &crd["spec"]["versions"][0]);
        let status = &version["schema"]["openAPIV3Schema"]["properties"]["status"];
        if status["properties"]["conditions"].is_null() {
            continue;
        }
        kinds += 1;
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        let shows = |name: &str, path: &str| {
            let mut columns = columns.iter();
            columns.any(|column| column["name"] == name && column["jsonPath"] == path)
        };
        let is_shown = |of: &str| shows(of, &format!(".status.conditions[?(@.type=='{of}')].status"));
        assert!(SUMMARIES.into_iter().any(is_shown), "{kind}: {columns:#?}");
        let reason = ".status.conditions[?(@.status=='False')].reason";
        assert!(shows("Reason", reason), "{kind}: {columns:#?}");
    }
    assert!(kinds >= 10, "{kinds} kinds have conditions");
}

#[test]
fn kubectl_get_shows_ranges_as_one_text() {
    let mut kinds = Vec::new();
    for crd in thuban_api::crds()
        .into_iter()
        .chain(thuban_api::load_balancer_crds())
    {
        let kind = crd.spec.names.kind.clone();
        let crd = serde_json::to_value(crd).unwrap();
        let version = &crd["spec"]["versions"][0];
        let schema = &version["schema"]["openAPIV3Schema"]["properties"];
        if schema["spec"]["properties"]["cidrs"].is_null() {
            continue;
        }
        let columns = version["additionalPrinterColumns"].as_array().unwrap();
        let ranges = columns.iter().find(|column| column["name"] == "Ranges");
        assert_eq!(ranges.unwrap()["jsonPath"], ".status.ranges", "{kind}");
        assert_eq!(
            schema["status"]["properties"]["ranges"]["type"], "string",
            "{kind}"
        );
        kinds.push(kind);
    }
    assert_eq!(kinds, ["Vpc", "Network", "IpPool"]);
}

#[test]
fn kubectl_explain_says_what_each_field_means() {
    for crd in thuban_api::crds()
        .into_iter()
        .chain(thuban_api::load_balancer_crds())
    {
        let kind = crd.spec.names.kind.clone();
        let crd = serde_json::to_value(crd).unwrap();
        let schema = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"];
        let text = schema["description"].as_str().unwrap_or_default();
        assert!(!text.starts_with("Auto-generated"), "{kind}: {text}");
        assert_eq!(undescribed(&kind, schema), [""; 0]);
        let conditions = &schema["properties"]["status"]["properties"]["conditions"];
        assert!(
            conditions.is_null() || conditions["x-kubernetes-list-map-keys"] == serde_json::json!(["type"]),
            "{kind}"
        );
    }
}
