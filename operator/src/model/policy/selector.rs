//! Label selectors in a form in which those of equal requirements are equal.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use super::malformed::{Malformed, Problem, each};

pub type Labels = BTreeMap<String, String>;

/// Requirements that must all be met; none are met by all.
///
/// It is displayed as Kubernetes writes selectors. Keys and values are checked, so the text says which selector it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Selector(BTreeSet<Requirement>);

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
struct Requirement {
    key: String,
    test: Test,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
enum Test {
    In(BTreeSet<String>),
    NotIn(BTreeSet<String>),
    Exists,
    DoesNotExist,
}

/// The most labels that a selector is found by, so that selectors with thousands of values take no more room in an
/// index than others.
const MAX_ANCHORS: usize = 16;

/// What labels must have, or a selector doesn't match them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Anchor {
    Label(String, String),
    Key(String),
    Nothing,
}

impl Selector {
    pub fn read(selector: &LabelSelector) -> Result<Self, Malformed> {
        let equal = selector.match_labels.iter().flatten().map(|(key, value)| {
            Requirement::new(key, Test::In([value.clone()].into()))
                .map_err(|error| error.within("matchLabels"))
        });
        let mut requirements = equal.collect::<Result<BTreeSet<_>, _>>()?;
        let expressions = selector.match_expressions.as_deref().unwrap_or_default();
        requirements.extend(each("matchExpressions", expressions, Requirement::read)?);
        Ok(Self(requirements))
    }

    /// Reads the selector of a field.
    pub fn of_field(selector: &LabelSelector, field: &str) -> Result<Self, Malformed> {
        Self::read(selector).map_err(|malformed| malformed.within(field))
    }

    /// Returns the selector of a label.
    pub fn of_label(key: &str, value: &str) -> Self {
        let (key, values) = (key.to_owned(), [value.to_owned()].into());
        let test = Test::In(values);
        Self([Requirement { key, test }].into())
    }

    pub fn matches(&self, labels: &Labels) -> bool {
        self.0
            .iter()
            .all(|requirement| requirement.test.admits(labels.get(&requirement.key)))
    }

    /// Returns what any labels that match must have one of: the narrowest that is known.
    pub fn anchors(&self) -> Vec<Anchor> {
        let narrowest = self.0.iter().min_by_key(|requirement| match &requirement.test {
            Test::In(values) if values.len() <= MAX_ANCHORS => values.len(),
            Test::In(_) | Test::Exists => usize::MAX - 1,
            Test::NotIn(_) | Test::DoesNotExist => usize::MAX,
        });
        let Some(Requirement { key, test }) = narrowest else {
            return vec![Anchor::Nothing];
        };
        match test {
            Test::In(values) if values.len() <= MAX_ANCHORS => {
                let label = |value: &String| Anchor::Label(key.clone(), value.clone());
                values.iter().map(label).collect()
            }
            Test::In(_) | Test::Exists => vec![Anchor::Key(key.clone())],
            Test::NotIn(_) | Test::DoesNotExist => vec![Anchor::Nothing],
        }
    }
}

impl Anchor {
    /// Returns all that labels have.
    pub fn of(labels: &Labels) -> impl Iterator<Item = Self> {
        let each = labels
            .iter()
            .flat_map(|(key, value)| [Self::Label(key.clone(), value.clone()), Self::Key(key.clone())]);
        each.chain([Self::Nothing])
    }
}

impl Requirement {
    fn new(key: &str, test: Test) -> Result<Self, Malformed> {
        if !is_key(key) {
            return Err(Malformed::new("key", Problem::Key(key.to_owned())));
        }
        if let Test::In(values) | Test::NotIn(values) = &test
            && let Some(bad) = values.iter().find(|value| !value.is_empty() && !is_name(value))
        {
            return Err(Malformed::new("values", Problem::Value(bad.clone())));
        }
        let key = key.to_owned();
        Ok(Self { key, test })
    }

    fn read(expression: &LabelSelectorRequirement) -> Result<Self, Malformed> {
        let values: BTreeSet<String> = expression.values.iter().flatten().cloned().collect();
        let (test, takes_values) = match expression.operator.as_str() {
            "In" => (Test::In(values.clone()), true),
            "NotIn" => (Test::NotIn(values.clone()), true),
            "Exists" => (Test::Exists, false),
            "DoesNotExist" => (Test::DoesNotExist, false),
            other => return Err(Malformed::new("operator", Problem::Operator(other.to_owned()))),
        };
        match (takes_values, values.is_empty()) {
            (true, true) => Err(Malformed::new("values", Problem::NoValues)),
            (false, false) => Err(Malformed::new("values", Problem::Values)),
            _ => Self::new(&expression.key, test),
        }
    }
}

impl Test {
    fn admits(&self, value: Option<&String>) -> bool {
        match self {
            Self::In(values) => value.is_some_and(|value| values.contains(value)),
            Self::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
        }
    }
}

impl fmt::Display for Selector {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, Requirement { key, test }) in self.0.iter().enumerate() {
            formatter.write_str(if index == 0 { "" } else { "," })?;
            let list =
                |values: &BTreeSet<String>| values.iter().map(String::as_str).collect::<Vec<_>>().join(",");
            match test {
                Test::In(values) => write!(formatter, "{key} in ({})", list(values))?,
                Test::NotIn(values) => write!(formatter, "{key} notin ({})", list(values))?,
                Test::Exists => write!(formatter, "{key}")?,
                Test::DoesNotExist => write!(formatter, "!{key}")?,
            }
        }
        Ok(())
    }
}

/// Whether a label can have the key: a name, behind a DNS subdomain and a slash or not.
fn is_key(key: &str) -> bool {
    let Some((domain, name)) = key.split_once('/') else {
        return is_name(key);
    };
    let is_lower = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    is_name(name) && domain.len() <= 253 && domain.split('.').all(|part| is_framed(part, is_lower, b"-"))
}

fn is_name(name: &str) -> bool {
    name.len() <= 63 && is_framed(name, |byte| byte.is_ascii_alphanumeric(), b"-_.")
}

/// Whether the text begins and ends with such a byte, and has others of the given ones in between at most.
fn is_framed(text: &str, is_end: impl Fn(u8) -> bool, inner: &[u8]) -> bool {
    let bytes = text.as_bytes();
    let ends = [bytes.first(), bytes.last()];
    ends.into_iter().all(|end| end.is_some_and(|byte| is_end(*byte)))
        && bytes.iter().all(|byte| is_end(*byte) || inner.contains(byte))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::{Anchor, Labels, MAX_ANCHORS, Selector};

    fn read(selector: Value) -> Result<Selector, String> {
        Selector::read(&serde_json::from_value(selector).unwrap()).map_err(|error| error.to_string())
    }

    fn expression(operator: &str, values: &[&str]) -> Value {
        json!({"matchExpressions": [{"key": "app", "operator": operator, "values": values}]})
    }

    fn labels(pairs: &[(&str, &str)]) -> Labels {
        let owned = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn each_operator_admits_what_kubernetes_says() {
        let web = labels(&[("app", "web")]);
        let none = labels(&[("other", "web")]);
        for (operator, values, with, without) in [
            ("In", &["web", "db"][..], true, false),
            ("In", &["db"], false, false),
            ("NotIn", &["web", "db"], false, true),
            ("NotIn", &["db"], true, true),
            ("Exists", &[], true, false),
            ("DoesNotExist", &[], false, true),
        ] {
            let selector = read(expression(operator, values)).unwrap();
            assert_eq!(selector.matches(&web), with, "{selector}");
            assert_eq!(selector.matches(&none), without, "{selector}");
        }
        assert!(read(json!({})).unwrap().matches(&none));
    }

    #[test]
    fn all_requirements_must_be_met() {
        let selector = read(json!({
            "matchLabels": {"app": "web", "tier": "front"},
            "matchExpressions": [{"key": "old", "operator": "DoesNotExist"}],
        }))
        .unwrap();
        assert!(selector.matches(&labels(&[("app", "web"), ("tier", "front")])));
        assert!(!selector.matches(&labels(&[("app", "web")])));
        assert!(!selector.matches(&labels(&[("app", "web"), ("tier", "front"), ("old", "")])));
    }

    #[test]
    fn selectors_of_equal_requirements_are_equal() {
        let equal = read(json!({"matchLabels": {"app": "web"}})).unwrap();
        assert_eq!(read(expression("In", &["web", "web"])).unwrap(), equal);
        assert_eq!(
            read(expression("In", &["b", "a"])),
            read(expression("In", &["a", "b"]))
        );
        let exists = json!({"key": "a", "operator": "Exists"});
        let is_not = json!({"key": "a", "operator": "NotIn", "values": ["x", ""]});
        let one = read(json!({"matchExpressions": [exists, is_not]})).unwrap();
        assert_eq!(
            read(json!({"matchExpressions": [is_not, exists, is_not]})).unwrap(),
            one
        );
        assert_eq!(one.to_string(), "a notin (,x),a");
        assert_eq!(read(expression("DoesNotExist", &[])).unwrap().to_string(), "!app");
        assert_eq!(equal.to_string(), "app in (web)");
    }

    #[test]
    fn a_selector_that_means_nothing_is_refused_by_field() {
        let refused = |selector: Value, field: &str| {
            let error = read(selector).unwrap_err();
            assert!(error.starts_with(&format!("{field}: ")), "{error}");
        };
        refused(expression("in", &["web"]), "matchExpressions[0].operator");
        refused(expression("In", &[]), "matchExpressions[0].values");
        refused(expression("NotIn", &[]), "matchExpressions[0].values");
        refused(expression("Exists", &["web"]), "matchExpressions[0].values");
        refused(expression("In", &["web,db"]), "matchExpressions[0].values");
        refused(json!({"matchLabels": {"app": "-"}}), "matchLabels.values");
        let long = "a".repeat(64);
        for key in [
            "", "/a", "a/", "a/b/c", "-a", "a_", "A.b/c", "a..b/c", "ä", "a b", &long,
        ] {
            refused(json!({"matchLabels": {key: "web"}}), "matchLabels.key");
        }
        for key in ["a", "A_1.b-c", "example.com/A", "thuban.dev/vpc", &long[1..]] {
            assert!(read(json!({"matchLabels": {key: ""}})).is_ok(), "{key}");
        }
    }

    #[test]
    fn labels_that_match_have_an_anchor_of_the_selector() {
        let label = |key: &str, value: &str| Anchor::Label(key.to_owned(), value.to_owned());
        let expressions = json!([
            {"key": "a", "operator": "NotIn", "values": ["x"]},
            {"key": "b", "operator": "In", "values": ["x", "y"]},
            {"key": "c", "operator": "In", "values": ["x", "y", "z"]},
            {"key": "d", "operator": "Exists"},
        ]);
        let selector = read(json!({"matchExpressions": expressions})).unwrap();
        assert_eq!(selector.anchors(), [label("b", "x"), label("b", "y")]);
        let exists = json!({"matchExpressions": [expressions[0], expressions[3]]});
        assert_eq!(read(exists).unwrap().anchors(), [Anchor::Key("d".to_owned())]);
        let values = |count: usize| (0..count).map(|number| number.to_string()).collect::<Vec<_>>();
        let any =
            |count| json!({"matchExpressions": [{"key": "e", "operator": "In", "values": values(count)}]});
        assert_eq!(read(any(MAX_ANCHORS)).unwrap().anchors().len(), MAX_ANCHORS);
        let many = read(any(MAX_ANCHORS + 1)).unwrap();
        assert_eq!(many.anchors(), [Anchor::Key("e".to_owned())]);
        let open = json!({"matchExpressions": [expressions[0]]});
        assert_eq!(read(open).unwrap().anchors(), [Anchor::Nothing]);
        assert_eq!(read(json!({})).unwrap().anchors(), [Anchor::Nothing]);
        let of: Vec<Anchor> = Anchor::of(&labels(&[("a", "x")])).collect();
        assert_eq!(
            of,
            [label("a", "x"), Anchor::Key("a".to_owned()), Anchor::Nothing]
        );
    }
}
