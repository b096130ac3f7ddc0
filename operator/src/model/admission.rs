//! Decides which network a pod is in, and whether VPC and network let its namespace in.

use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use thuban_api::{DEFAULT_NAME, NETWORK_ANNOTATION, Network, Vpc};

type Labels = BTreeMap<String, String>;

/// The reason why a pod gets no endpoint. The messages are for the person who made the pod.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error(
        "annotation {NETWORK_ANNOTATION} names the network {network:?}, which does not exist; \
         name an existing one, or ask the owner of the VPC to create it (kubectl get networks.thuban.dev lists \
         networks, if you may)"
    )]
    NetworkNotFound { network: String },
    #[error("the operator has not seen namespace {namespace:?} yet; it tries again by itself")]
    NamespaceNotFound { namespace: String },
    #[error(
        "network {network:?} is in VPC {vpc:?}, which does not exist; choose another network, or ask its owner"
    )]
    VpcNotFound { network: String, vpc: String },
    #[error(
        "namespace {namespace:?} may not enter VPC {vpc:?}: spec.allowedNamespaces of the VPC does not select it; \
         choose another network by the annotation {NETWORK_ANNOTATION} or ask the VPC's owner"
    )]
    VpcForbids { namespace: String, vpc: String },
    #[error(
        "namespace {namespace:?} may not enter network {network:?} of VPC {vpc:?}: spec.allowedNamespaces of the \
         network does not select it; choose another network by the annotation {NETWORK_ANNOTATION} or ask its owner"
    )]
    NetworkForbids {
        namespace: String,
        network: String,
        vpc: String,
    },
    #[error(
        "network {network:?} is being deleted and takes nobody; choose another network by the annotation \
         {NETWORK_ANNOTATION}"
    )]
    NetworkDeleting { network: String },
    #[error(
        "network {network:?} takes nobody: its VPC {vpc:?} is being deleted; choose a network of another VPC by the \
         annotation {NETWORK_ANNOTATION}"
    )]
    VpcDeleting { network: String, vpc: String },
}

impl Refusal {
    /// Whether the cause is a missing object, which may exist and not be seen yet.
    pub fn is_unseen(&self) -> bool {
        matches!(
            self,
            Self::NetworkNotFound { .. } | Self::NamespaceNotFound { .. } | Self::VpcNotFound { .. }
        )
    }

    /// Returns the CamelCase reason of the condition, the event and the row.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NetworkNotFound { .. } => "NetworkNotFound",
            Self::NamespaceNotFound { .. } => "NamespaceNotFound",
            Self::VpcNotFound { .. } => "VpcNotFound",
            Self::VpcForbids { .. } | Self::NetworkForbids { .. } => "NamespaceNotAllowed",
            Self::NetworkDeleting { .. } => "NetworkDeleting",
            Self::VpcDeleting { .. } => "VpcDeleting",
        }
    }
}

/// Returns the pod's network: by its annotation, else by its namespace's, else the default network.
pub fn network_of(pod: &BTreeMap<String, String>, namespace: &BTreeMap<String, String>) -> String {
    let named = pod
        .get(NETWORK_ANNOTATION)
        .or_else(|| namespace.get(NETWORK_ANNOTATION));
    named.cloned().unwrap_or_else(|| DEFAULT_NAME.to_owned())
}

/// Decides whether a namespace may enter; `labels` are the namespace's.
pub fn admit(
    namespace: &str,
    labels: &Labels,
    name: &str,
    network: Option<&Network>,
    vpc: Option<&Vpc>,
) -> Result<(), Refusal> {
    let network = network.ok_or_else(|| Refusal::NetworkNotFound {
        network: name.to_owned(),
    })?;
    let vpc_name = &network.spec.vpc;
    let vpc = vpc.ok_or_else(|| Refusal::VpcNotFound {
        network: name.to_owned(),
        vpc: vpc_name.clone(),
    })?;
    let is_open = |object: &str| object == DEFAULT_NAME;
    if !is_open(vpc_name) && !selects(vpc.spec.allowed_namespaces.as_ref(), labels) {
        return Err(Refusal::VpcForbids {
            namespace: namespace.to_owned(),
            vpc: vpc_name.clone(),
        });
    }
    if !is_open(name) && !selects(network.spec.allowed_namespaces.as_ref(), labels) {
        let (namespace, network) = (namespace.to_owned(), name.to_owned());
        return Err(Refusal::NetworkForbids {
            namespace,
            network,
            vpc: vpc_name.clone(),
        });
    }
    Ok(())
}

/// Whether the selector selects the labels. None selects nothing, an empty selector everything, an unknown operator
/// nothing.
pub fn selects(selector: Option<&LabelSelector>, labels: &Labels) -> bool {
    let Some(selector) = selector else { return false };
    let equal = selector
        .match_labels
        .iter()
        .flatten()
        .all(|(key, value)| labels.get(key) == Some(value));
    let expressions = selector.match_expressions.iter().flatten().all(|expression| {
        let value = labels.get(&expression.key);
        let listed = |value: &String| expression.values.iter().flatten().any(|other| other == value);
        match expression.operator.as_str() {
            "In" => value.is_some_and(listed),
            "NotIn" => !value.is_some_and(listed),
            "Exists" => value.is_some(),
            "DoesNotExist" => value.is_none(),
            _ => false,
        }
    });
    equal && expressions
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
    use serde_json::json;
    use thuban_api::{Network, NetworkSpec, Vpc, VpcSpec};

    use super::{Refusal, admit, network_of, selects};

    fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn selector(value: serde_json::Value) -> LabelSelector {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn no_selector_admits_nobody_and_an_empty_one_all() {
        let red = labels(&[("team", "red")]);
        assert!(!selects(None, &red));
        assert!(selects(Some(&selector(json!({}))), &red));
        assert!(selects(
            Some(&selector(json!({"matchLabels": {"team": "red"}}))),
            &red
        ));
        assert!(!selects(
            Some(&selector(json!({"matchLabels": {"team": "blue"}}))),
            &red
        ));
        let expression = |operator: &str, values: &[&str]| {
            let expressions = json!([{"key": "team", "operator": operator, "values": values}]);
            selects(Some(&selector(json!({"matchExpressions": expressions}))), &red)
        };
        assert!(expression("In", &["red"]) && !expression("In", &["blue"]));
        assert!(!expression("NotIn", &["red"]) && expression("NotIn", &["blue"]));
        assert!(expression("Exists", &[]) && !expression("DoesNotExist", &[]));
        assert!(
            !expression("Like", &["red"]),
            "an unknown operator selects nothing"
        );
    }

    #[test]
    fn the_pods_annotation_goes_before_its_namespaces() {
        let named = |name| labels(&[("thuban.dev/network", name)]);
        assert_eq!(network_of(&named("a"), &named("b")), "a");
        assert_eq!(network_of(&labels(&[]), &named("b")), "b");
        assert_eq!(network_of(&labels(&[]), &labels(&[])), "default");
    }

    #[test]
    fn both_the_vpc_and_the_network_must_admit() {
        let all = Some(selector(json!({})));
        let vpc = |allowed: &Option<LabelSelector>| {
            Vpc::new(
                "red",
                VpcSpec {
                    autoscale: None,
                    egress: None,
                    shared_services: None,
                    bandwidth: None,
                    dscp: None,
                    denied_traffic: None,
                    cidrs: vec![],
                    dividers: 1,
                    allowed_namespaces: allowed.clone(),
                },
            )
        };
        let network = |allowed: &Option<LabelSelector>| {
            let spec = NetworkSpec {
                autoscale: None,
                egress: None,
                bandwidth: None,
                vpc: "red".into(),
                cidrs: vec![],
                bouncers: 1,
                allowed_namespaces: allowed.clone(),
                allow_static_ips: false,
            };
            Network::new("web", spec)
        };
        let admit =
            |network: Option<&Network>, vpc: Option<&Vpc>| admit("ns", &labels(&[]), "web", network, vpc);
        assert_eq!(admit(Some(&network(&all)), Some(&vpc(&all))), Ok(()));
        assert!(matches!(
            admit(Some(&network(&all)), Some(&vpc(&None))),
            Err(Refusal::VpcForbids { .. })
        ));
        assert!(matches!(
            admit(Some(&network(&None)), Some(&vpc(&all))),
            Err(Refusal::NetworkForbids { .. })
        ));
        assert!(matches!(admit(None, None), Err(Refusal::NetworkNotFound { .. })));
        assert!(matches!(
            admit(Some(&network(&all)), None),
            Err(Refusal::VpcNotFound { .. })
        ));
    }
}
