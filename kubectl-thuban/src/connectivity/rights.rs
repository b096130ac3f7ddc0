//! Asks the API server whether the user may do what the test does, before the test makes anything: a run that may make
//! objects and not delete them would leave them.

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::api::PostParams;
use kube::{Api, Client};
use thuban_api::GROUP;

use super::failed;
use crate::error::CliError;

/// A verb, a group, and a resource with its subresource.
type Right = (&'static str, &'static str, &'static str);

const OF_CLUSTER: [Right; 6] = [
    ("create", "", "namespaces"),
    ("delete", "", "namespaces"),
    ("create", GROUP, "vpcs"),
    ("delete", GROUP, "vpcs"),
    ("create", GROUP, "networks"),
    ("delete", GROUP, "networks"),
];
const OF_NAMESPACE: [Right; 6] = [
    ("create", "", "pods"),
    ("list", "", "pods"),
    ("get", "", "pods/log"),
    ("create", "", "services"),
    ("create", "networking.k8s.io", "networkpolicies"),
    ("get", GROUP, "policystates"),
];

/// Returns an error that names the rights that the user lacks, if any. The namespace need not exist.
pub async fn require(client: &Client, namespace: &str) -> Result<(), CliError> {
    let of_cluster = OF_CLUSTER.map(|right| (right, None));
    let of_namespace = OF_NAMESPACE.map(|right| (right, Some(namespace)));
    let mut lacking = Vec::new();
    for (right, namespace) in of_cluster.into_iter().chain(of_namespace) {
        if !has(client, right, namespace).await? {
            lacking.push(name(right));
        }
    }
    if lacking.is_empty() {
        Ok(())
    } else {
        Err(CliError::MayNotTest(lacking.join(", ")))
    }
}

async fn has(client: &Client, right: Right, namespace: Option<&str>) -> Result<bool, CliError> {
    let (verb, group, resource) = right;
    let (resource, subresource) = match resource.split_once('/') {
        Some((resource, subresource)) => (resource, Some(subresource.to_owned())),
        None => (resource, None),
    };
    let attributes = ResourceAttributes {
        verb: Some(verb.to_owned()),
        group: Some(group.to_owned()),
        resource: Some(resource.to_owned()),
        subresource,
        namespace: namespace.map(str::to_owned),
        ..ResourceAttributes::default()
    };
    let review = SelfSubjectAccessReview {
        spec: SelfSubjectAccessReviewSpec {
            resource_attributes: Some(attributes),
            ..SelfSubjectAccessReviewSpec::default()
        },
        ..SelfSubjectAccessReview::default()
    };
    let reviews: Api<SelfSubjectAccessReview> = Api::all(client.clone());
    let answer = Box::pin(reviews.create(&PostParams::default(), &review)).await;
    let status = answer.map_err(failed)?.status;
    Ok(status.is_some_and(|status| status.allowed))
}

/// Returns a right in the words of kubectl, such as `create vpcs.thuban.dev`.
fn name((verb, group, resource): Right) -> String {
    if group.is_empty() {
        format!("{verb} {resource}")
    } else {
        format!("{verb} {resource}.{group}")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::require;
    use crate::testing::{refusal, server};

    fn review(is_allowed: bool) -> (u16, String) {
        let review = json!({"kind": "SelfSubjectAccessReview", "apiVersion": "authorization.k8s.io/v1",
            "metadata": {}, "spec": {}, "status": {"allowed": is_allowed}});
        (201, review.to_string())
    }

    #[tokio::test]
    async fn the_rights_that_are_lacking_are_named_and_no_others() {
        let asked = std::sync::Arc::default();
        require(&server(|_| review(true), &asked), "net-a").await.unwrap();
        let paths = asked.lock().unwrap().clone();
        assert_eq!(paths.len(), 12, "{paths:?}");
        assert!(
            paths
                .iter()
                .all(|path| path.ends_with("/selfsubjectaccessreviews"))
        );
        let error = require(&server(|_| review(false), &asked), "net-a").await;
        let error = error.unwrap_err().to_string();
        assert!(error.contains("create namespaces, delete namespaces"), "{error}");
        assert!(error.contains("create vpcs.thuban.dev"), "{error}");
        assert!(error.contains("get pods/log"), "{error}");
        assert!(error.contains("cluster administrator"), "{error}");
    }

    #[tokio::test]
    async fn an_api_server_that_refuses_to_say_is_an_error() {
        let asked = std::sync::Arc::default();
        let error = require(&server(|_| refusal(403, "no reviews"), &asked), "net-a").await;
        assert_eq!(error.unwrap_err().to_string(), "no reviews");
    }
}
