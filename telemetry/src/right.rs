//! What a reader must be allowed to do, as the API server's reviews name it.

use k8s_openapi::api::authorization::v1::{
    NonResourceAttributes, ResourceAttributes, SubjectAccessReviewSpec,
};
use sha2::{Digest, Sha256};

/// The verb of each right.
const VERB: &str = "get";
/// Stands for a token and a right.
pub(crate) type Digest256 = [u8; 32];

/// What a reader must be allowed to get.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Right {
    /// A path of the API server.
    Path(&'static str),
    /// All objects of a resource: in a namespace, or in all namespaces.
    Resource {
        group: &'static str,
        resource: &'static str,
        namespace: Option<String>,
    },
}

impl Right {
    /// The right to the guarded pages.
    pub(crate) const METRICS: Self = Self::Path("/metrics");

    /// Returns what stands for the token and this right.
    pub(crate) fn digest(&self, token: &str) -> Digest256 {
        let (kind, parts) = match self {
            Self::Path(path) => ("path", [*path, "", ""]),
            Self::Resource {
                group,
                resource,
                namespace: None,
            } => ("everywhere", [*group, *resource, ""]),
            Self::Resource {
                group,
                resource,
                namespace: Some(namespace),
            } => ("namespace", [*group, *resource, namespace.as_str()]),
        };
        let mut digest = Sha256::new();
        // No header has the byte 0, so no text runs into the next one.
        for part in [kind].iter().chain(&parts).chain(&[token]) {
            digest.update(part);
            digest.update([0]);
        }
        digest.finalize().into()
    }

    /// Asks about this right.
    pub(crate) fn fill(&self, spec: &mut SubjectAccessReviewSpec) {
        match self {
            Self::Path(path) => {
                spec.non_resource_attributes = Some(NonResourceAttributes {
                    path: Some((*path).to_owned()),
                    verb: Some(VERB.to_owned()),
                });
            }
            Self::Resource {
                group,
                resource,
                namespace,
            } => {
                spec.resource_attributes = Some(ResourceAttributes {
                    group: Some((*group).to_owned()),
                    resource: Some((*resource).to_owned()),
                    namespace: namespace.clone(),
                    verb: Some(VERB.to_owned()),
                    ..ResourceAttributes::default()
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::Right;

    fn flows(namespace: Option<&str>) -> Right {
        Right::Resource {
            group: "thuban.dev",
            resource: "flows",
            namespace: namespace.map(str::to_owned),
        }
    }

    #[test]
    fn a_token_and_a_right_do_not_run_into_each_other() {
        let digests = [
            flows(Some("red")).digest("a"),
            flows(Some("reda")).digest(""),
            flows(None).digest("reda"),
            flows(Some("")).digest("reda"),
            Right::METRICS.digest("a"),
        ];
        let different: HashSet<_> = digests.iter().collect();
        assert_eq!(different.len(), digests.len());
    }
}
