//! The environment by which a runtime tells the verb and the attachment (CNI spec 1.1, "Parameters").

use crate::config::is_identifier;
use crate::error::PluginError;

/// The operation that the runtime asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
}

/// The variables, read once. Accessors demand those that a verb needs.
#[derive(Debug)]
pub struct Environment {
    pub verb: Verb,
    container_id: String,
    netns: String,
    ifname: String,
    arguments: String,
}

/// The pod behind an attachment, from `CNI_ARGS`.
#[derive(Debug, PartialEq, Eq)]
pub struct Pod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

impl Environment {
    pub fn read(get: impl Fn(&str) -> Option<String>) -> Result<Self, PluginError> {
        let text = |name| get(name).unwrap_or_default();
        let verb = match text("CNI_COMMAND").as_str() {
            "ADD" => Verb::Add,
            "DEL" => Verb::Del,
            "CHECK" => Verb::Check,
            "STATUS" => Verb::Status,
            "GC" => Verb::Gc,
            "VERSION" => Verb::Version,
            _ => {
                return Err(PluginError::Environment {
                    variable: "CNI_COMMAND",
                    expected: "ADD, DEL, CHECK, GC, STATUS or VERSION",
                });
            }
        };
        Ok(Self {
            verb,
            container_id: text("CNI_CONTAINERID"),
            netns: text("CNI_NETNS"),
            ifname: text("CNI_IFNAME"),
            arguments: text("CNI_ARGS"),
        })
    }

    /// Returns the container id, which has at most 128 bytes because it becomes part of file names.
    pub fn container_id(&self) -> Result<&str, PluginError> {
        if is_identifier(&self.container_id) && self.container_id.len() <= 128 {
            Ok(&self.container_id)
        } else {
            Err(PluginError::Environment {
                variable: "CNI_CONTAINERID",
                expected: "a letter or digit followed by letters, digits, _ . -, at most 128 bytes",
            })
        }
    }

    /// Returns the interface's name, if Linux takes it for one.
    pub fn ifname(&self) -> Result<&str, PluginError> {
        let name = &self.ifname;
        let bad = name.is_empty() || name.len() > 15 || name == "." || name == "..";
        if bad
            || name
                .chars()
                .any(|c| c == '/' || c == ':' || c.is_whitespace() || c.is_control())
        {
            return Err(PluginError::Environment {
                variable: "CNI_IFNAME",
                expected: "an interface name of 1 to 15 bytes without / : or spaces",
            });
        }
        Ok(name)
    }

    pub fn netns(&self) -> Result<&str, PluginError> {
        if self.netns.starts_with('/') {
            Ok(&self.netns)
        } else {
            Err(PluginError::Environment {
                variable: "CNI_NETNS",
                expected: "the absolute path of the pod's network namespace",
            })
        }
    }

    /// Returns the path of the namespace; empty on a DEL after a reboot.
    pub fn optional_netns(&self) -> &str {
        &self.netns
    }

    pub fn pod(&self) -> Result<Pod, PluginError> {
        let value = |key: &str| {
            self.arguments
                .split(';')
                .filter_map(|pair| pair.split_once('='))
                .find(|(name, _)| *name == key)
                .map(|(_, value)| value.to_owned())
                .filter(|value| !value.is_empty())
                .ok_or(PluginError::Environment {
                    variable: "CNI_ARGS",
                    expected: "K8S_POD_NAMESPACE, K8S_POD_NAME and K8S_POD_UID, each KEY=VALUE, separated by semicolons",
                })
        };
        Ok(Pod {
            namespace: value("K8S_POD_NAMESPACE")?,
            name: value("K8S_POD_NAME")?,
            uid: value("K8S_POD_UID")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn environment(variables: &[(&str, &str)]) -> Result<Environment, PluginError> {
        Environment::read(|name| {
            variables
                .iter()
                .find(|(n, _)| *n == name)
                .map(|(_, v)| (*v).to_owned())
        })
    }

    #[test]
    fn an_unknown_verb_is_code_4_and_names_the_variable() {
        for variables in [vec![], vec![("CNI_COMMAND", "add")]] {
            let error = environment(&variables).unwrap_err();
            assert_eq!(error.code(), 4);
            assert!(error.to_string().contains("CNI_COMMAND"), "{error}");
        }
    }

    #[test]
    fn names_that_could_leave_their_directory_are_refused() {
        for id in ["", "../x", "a/b", ".x", "a b"] {
            assert!(
                environment(&[("CNI_COMMAND", "ADD"), ("CNI_CONTAINERID", id)])
                    .unwrap()
                    .container_id()
                    .is_err()
            );
        }
        for name in ["", "..", "a/b", "0123456789abcdef", "a b"] {
            assert!(
                environment(&[("CNI_COMMAND", "ADD"), ("CNI_IFNAME", name)])
                    .unwrap()
                    .ifname()
                    .is_err()
            );
        }
    }

    #[test]
    fn the_pod_comes_from_cni_args_and_each_part_is_needed() {
        let all = "IgnoreUnknown=1;K8S_POD_NAMESPACE=red;K8S_POD_NAME=web;K8S_POD_UID=u-1;K8S_POD_INFRA_CONTAINER_ID=c";
        let pod = environment(&[("CNI_COMMAND", "ADD"), ("CNI_ARGS", all)])
            .unwrap()
            .pod()
            .unwrap();
        assert_eq!(
            pod,
            Pod {
                namespace: "red".into(),
                name: "web".into(),
                uid: "u-1".into()
            }
        );
        for missing in [
            "",
            "K8S_POD_NAMESPACE=red;K8S_POD_NAME=web",
            "K8S_POD_NAMESPACE=;K8S_POD_NAME=a;K8S_POD_UID=b",
        ] {
            let error = environment(&[("CNI_COMMAND", "ADD"), ("CNI_ARGS", missing)])
                .unwrap()
                .pod()
                .unwrap_err();
            assert_eq!(error.code(), 4);
        }
    }
}
