//! Groups, found by what their pods must have: a pod is matched against few of many.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::group::{Group, Namespaces, Selectable};
use super::selector::Anchor;

/// Groups with what belongs to each.
#[derive(Debug)]
pub struct Index<T>(HashMap<Place, Slots<T>>);

type Slots<T> = HashMap<Anchor, BTreeSet<(Arc<Group>, T)>>;

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Place {
    Namespace(String),
    Selected(Anchor),
}

impl<T> Default for Index<T> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<T: Ord + Clone> Index<T> {
    pub fn insert(&mut self, group: &Arc<Group>, item: &T) {
        for (place, anchor) in slots(group) {
            let slot = self.0.entry(place).or_default().entry(anchor).or_default();
            slot.insert((Arc::clone(group), item.clone()));
        }
    }

    pub fn remove(&mut self, group: &Arc<Group>, item: &T) {
        let entry = (Arc::clone(group), item.clone());
        for (place, anchor) in slots(group) {
            let Some(slots) = self.0.get_mut(&place) else {
                continue;
            };
            if let Some(slot) = slots.get_mut(&anchor) {
                slot.remove(&entry);
                if slot.is_empty() {
                    slots.remove(&anchor);
                }
            }
            if slots.is_empty() {
                self.0.remove(&place);
            }
        }
    }

    /// Returns the groups that select the pod, each once, because labels have one value of a key; and against how many
    /// groups the pod was matched.
    pub fn selecting(&self, pod: &Selectable) -> (Vec<(&Group, &T)>, usize) {
        let mut matched = 0;
        let candidates = self.candidates(pod).inspect(|_| matched += 1);
        let found = candidates
            .filter(|(group, _)| group.selects(pod))
            .map(|(group, item)| (&**group, item))
            .collect();
        (found, matched)
    }

    fn candidates(&self, pod: &Selectable) -> impl Iterator<Item = &(Arc<Group>, T)> {
        let own = Place::Namespace(pod.namespace.to_owned());
        let places = Anchor::of(pod.namespace_labels).map(Place::Selected).chain([own]);
        let anchors: Vec<Anchor> = Anchor::of(&pod.labels).collect();
        let here = places.filter_map(|place| self.0.get(&place));
        here.flat_map(move |slots| {
            let found = anchors.iter().filter_map(|anchor| slots.get(anchor)).flatten();
            found.collect::<Vec<_>>()
        })
    }
}

fn slots(group: &Group) -> impl Iterator<Item = (Place, Anchor)> {
    let places = match group.namespaces() {
        Namespaces::Named(name) => vec![Place::Namespace(name.clone())],
        Namespaces::Selected(selector) => selector.anchors().into_iter().map(Place::Selected).collect(),
    };
    let anchors = group.pods().anchors();
    places.into_iter().flat_map(move |place| {
        let anchors = anchors.clone().into_iter();
        anchors.map(move |anchor| (place.clone(), anchor))
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::super::selector::{Labels, Selector};
    use super::{Group, Index, Namespaces, Selectable};

    fn selector(value: Value) -> Selector {
        Selector::read(&serde_json::from_value(value).unwrap()).unwrap()
    }

    fn labels(pairs: &[(&str, String)]) -> Labels {
        let owned = |(key, value): &(&str, String)| ((*key).to_owned(), value.clone());
        pairs.iter().map(owned).collect()
    }

    #[test]
    fn thousands_of_values_take_no_more_room_than_few() {
        let values: Vec<String> = (0..5000).map(|number| number.to_string()).collect();
        let any = |key: &str| json!({"matchExpressions": [{"key": key, "operator": "In", "values": values}]});
        let namespaces = Namespaces::Selected(selector(any("team")));
        let group = Arc::new(Group::new(namespaces, selector(any("app"))));
        let mut index = Index::default();
        index.insert(&group, &());
        assert_eq!(
            index
                .0
                .values()
                .map(std::collections::HashMap::len)
                .sum::<usize>(),
            1
        );
        let team = labels(&[("team", "4999".to_owned())]);
        let selected = |app: &str| {
            let pod = Selectable {
                namespace: "red",
                namespace_labels: &team,
                labels: labels(&[("app", app.to_owned())]),
            };
            index.selecting(&pod).0.len()
        };
        assert_eq!((selected("17"), selected("5000")), (1, 0));
    }

    #[test]
    fn a_pod_is_matched_against_few_of_many_groups() {
        let mut index = Index::default();
        let mut groups = Vec::new();
        for number in 0..10_000 {
            let (name, one) = (
                format!("n{number}"),
                json!({"matchLabels": {"one": number.to_string()}}),
            );
            let two = json!([{"key": "two", "operator": "In", "values": ["0", number.to_string()]}]);
            let two = json!({"matchExpressions": two});
            for (namespaces, pods) in [
                (Namespaces::Named(name.clone()), json!({})),
                (Namespaces::Named("n0".to_owned()), one.clone()),
                (
                    Namespaces::Selected(selector(one)),
                    json!({"matchLabels": {"app": "web"}}),
                ),
                (Namespaces::Selected(Selector::default()), two),
            ] {
                groups.push(Arc::new(Group::new(namespaces, selector(pods))));
            }
        }
        for group in &groups {
            index.insert(group, &());
        }
        let namespace_labels = labels(&[("one", "7".to_owned())]);
        let pod = Selectable {
            namespace: "n0",
            namespace_labels: &namespace_labels,
            labels: labels(&[("app", "web".into()), ("one", "8".into()), ("two", "9".into())]),
        };
        assert_eq!(index.candidates(&pod).count(), 4);
        let (found, matched) = index.selecting(&pod);
        assert_eq!((found.len(), matched), (4, 4));
        for group in &groups {
            index.remove(group, &());
        }
        assert!(index.0.is_empty(), "nothing is left behind");
    }
}
