//! Takes out of objects what may be secret, or is of no use: environments, annotations of others, managers of fields.
//!
//! Invariant: of a pod only the named fields are kept, so that new fields of pods can't leak.

use serde_json::{Map, Value, json};
use thuban_api::GROUP;

/// What stands in the place of a value.
const TAKEN_OUT: &str = "(left out)";

/// Returns an object without what may be secret.
pub fn scrub(kind: &str, mut object: Value) -> Value {
    if let Some(metadata) = object["metadata"].as_object_mut() {
        metadata.remove("managedFields");
        if let Some(annotations) = metadata.get_mut("annotations").and_then(Value::as_object_mut) {
            // kubectl keeps whole objects in an annotation, and tools of users keep all kinds of things.
            let ours = |name: &str| name.split_once('/').is_some_and(|(group, _)| group == GROUP);
            annotations.retain(|name, _| ours(name));
        }
    }
    if kind == "Pod" {
        return pod(&object);
    }
    take_values(&mut object);
    object
}

/// Returns the fields of a pod that matter to a network.
fn pod(object: &Value) -> Value {
    let (spec, status) = (&object["spec"], &object["status"]);
    let containers = list(spec, "containers", &["name", "image", "ports"]);
    json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": object["metadata"],
        "spec": some(spec, &["nodeName", "hostNetwork", "dnsPolicy", "readinessGates"], [("containers", containers)]),
        "status": some(
            status,
            &["phase", "conditions", "hostIP", "podIP", "podIPs", "startTime", "reason"],
            [("containerStatuses", list(status, "containerStatuses", &["name", "ready", "restartCount", "started"]))],
        ),
    })
}

/// Returns the items of a list, with some of their fields.
fn list(object: &Value, name: &str, fields: &[&str]) -> Value {
    let items = object[name].as_array().into_iter().flatten();
    items.map(|item| some(item, fields, [])).collect()
}

/// Returns some fields of an object, and others.
fn some<const N: usize>(object: &Value, fields: &[&str], others: [(&str, Value); N]) -> Value {
    let kept = fields.iter().filter_map(|field| {
        let value = object.get(field)?;
        Some(((*field).to_owned(), value.clone()))
    });
    let others = others.into_iter().map(|(name, value)| (name.to_owned(), value));
    Value::Object(kept.chain(others).collect::<Map<String, Value>>())
}

/// Takes the values out of all environments.
fn take_values(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::Array(variables) if name == "env" => {
                        for value in variables
                            .iter_mut()
                            .filter_map(|variable| variable.get_mut("value"))
                        {
                            *value = TAKEN_OUT.into();
                        }
                    }
                    value => take_values(value),
                }
            }
        }
        Value::Array(items) => items.iter_mut().for_each(take_values),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::scrub;

    const SECRET: &str = "hunter2";

    fn metadata() -> Value {
        json!({"name": "a", "labels": {"app": "a"}, "managedFields": [{"manager": SECRET}], "annotations": {
            "thuban.dev/network": "red-web", "kubectl.kubernetes.io/last-applied-configuration": SECRET}})
    }

    #[test]
    fn of_a_pod_only_what_matters_is_kept() {
        let object = json!({"metadata": metadata(), "spec": {"nodeName": "node-a", "containers": [
            {"name": "c", "image": "i", "args": [SECRET], "env": [{"name": "A", "value": SECRET}]}],
            "initContainers": [{"command": [SECRET]}]},
            "status": {"phase": "Running", "podIPs": [{"ip": "10.0.1.2"}], "containerStatuses": [
                {"name": "c", "restartCount": 3, "lastState": {"terminated": {"message": SECRET}}}]}});
        let kept = scrub("Pod", object);
        assert!(!kept.to_string().contains(SECRET), "{kept}");
        assert_eq!(kept["metadata"]["annotations"]["thuban.dev/network"], "red-web");
        assert_eq!(kept["spec"]["containers"][0], json!({"name": "c", "image": "i"}));
        assert_eq!(kept["status"]["containerStatuses"][0]["restartCount"], 3);
        assert_eq!(kept["status"]["podIPs"][0]["ip"], "10.0.1.2");
    }

    #[test]
    fn other_objects_keep_all_but_environments() {
        let object = json!({"metadata": metadata(), "spec": {"template": {"spec": {"containers": [
            {"name": "c", "env": [{"name": "A", "value": SECRET}, {"name": "B", "valueFrom": {}}]}]}}}});
        let kept = scrub("Deployment", object);
        assert!(!kept.to_string().contains(SECRET), "{kept}");
        let environment = &kept["spec"]["template"]["spec"]["containers"][0]["env"];
        assert_eq!(environment[0]["name"], "A");
        assert_eq!(environment[1]["name"], "B");
    }
}
