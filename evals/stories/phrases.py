"""Names, things and phrasings of the generated word problems: tables alone, no grammar.

In a phrase `{s}` is the person spoken of (name or pronoun), `{his}` and `{him}` go with it, `<buy>` is a verb that takes
the story's tense and the person's number (`:o` that of one, `:p` that of many), `{c}` is a worked calculation; the
stories fill the other slots. ` | ` stands between wordings. Sentences get their capital and full stop when they are
written. All sentences are our own.
"""

# ruff: noqa: E501, SIM905 - a wording is not broken; lists of words read better as one string
from __future__ import annotations

WOMEN = """Abigail Ada Agnes Aisha Alma Amara Amelia Ana Anika Anna Astrid Aurora Beatrice Bella Bianca Brenda Camila
Carla Carmen Celia Chloe Clara Claudia Dalia Daphne Delia Diana Dora Edith Elena Elsa Emily Erin Esme Eva Farah Fatima
Fiona Flora Freya Gemma Gina Grace Greta Hana Hannah Hazel Heidi Helen Ida Imani Ines Ingrid Irene Iris Isabel Ivy Jada
Jasmine Joan Josie Joyce June Kamala Karen Katie Keiko Kiara Lara Laura Leila Lena Lily Lina Lola Lucia Lucy Luna Mabel
Maggie Mara Margot Maria Marta Maya Mei Mila Mina Mira Molly Nadia Naomi Nina Noor Nora Olga Olive Paula Pearl Petra
Phoebe Priya Rachel Rita Rosa Rose Ruby Ruth Sadie Salma Sandra Sara Selma Sofia Stella Tara Tessa Tina Uma Vera Violet
Wanda Willa Yara Yuki Zara Zoe""".split()
MEN = """Aaron Abdul Adam Ahmed Alan Albert Alex Amir Andre Andrew Anton Arjun Arthur Barry Ben Bernard Boris Brian
Bruno Caleb Carl Carlos Cedric Cesar Charlie Chris Colin Cyrus Dan Daniel Darius Dennis Diego Dmitri Dominic Edgar Eli
Emil Enzo Eric Ethan Felix Finn Frank Fred Gabriel Gary George Gordon Greg Gus Hamid Harold Harry Hassan Hector Henry
Hugo Ian Isaac Ivan Jack Jacob Jamal James Jason Javier Jerome Joe Jonas Jorge Joseph Juan Julian Kai Karim Keith Kenji
Kevin Kofi Kurt Lars Leo Leon Liam Louis Luca Luis Luke Malik Marcus Mario Martin Mateo Max Miguel Milan Mohamed Nathan
Neil Nick Nikolai Noah Oliver Omar Oscar Otto Owen Pablo Patrick Paul Pedro Peter Philip Quentin Rafael Raj Ralph Ramon
Ravi Ray Robert Roland Rory Sam Samir Saul Sean Simon Stefan Steve Tariq Ted Theo Thomas Tim Toby Tom Tyler Victor
Vincent Walter Will Yusuf Zach""".split()
SURNAMES = """Adams Baker Bell Brooks Carter Chen Cole Cruz Diaz Evans Fisher Ford Garcia Gray Hall Hill Hughes Ito
Jones Kaya Khan Kim King Lane Lopez Marsh Mills Moreno Novak Okafor Park Patel Perez Quinn Reed Rossi Santos Shaw Silva
Singh Stone Tanaka Turner Wang Ward Webb West Wood Young""".split()
KIN = "sister mother aunt grandmother cousin neighbour teacher brother father uncle grandfather friend coach".split()
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
PETS = "dog cat rabbit hamster parrot goat".split()
PLACES = (
    "the market|the bakery|the hardware store|the school fair|the garden centre|the supermarket|the bookshop|"
    "the toy shop|a yard sale|the corner shop|the stationery shop|the craft fair|a department store"
).split("|")
TOWNS = "the beach | the city | the lake | the next town | the airport | the mountains | the farm | the stadium | the museum | the harbour | a friend's house | the village | the campsite"
VEHICLES = "car | bus | van | truck | motorbike"
JOBS = "waiter | cashier | gardener | tutor | mechanic | babysitter | lifeguard | painter | plumber | driver | librarian | baker | cleaner | nurse | electrician | carpenter | receptionist | farm hand | dog walker | photographer"
CHORES = "mowing lawns | walking dogs | washing cars | selling lemonade | delivering newspapers | teaching piano | watering plants | shovelling snow | looking after cats | repairing bicycles"
NEEDS = "food | bus tickets | rent | books | lunches | fuel | phone calls | music lessons | clothes"
GOALS = "bicycle | laptop | guitar | camera | game console | tent | skateboard | phone | drum set | telescope | sofa | piano"
HOBBIES = "practises the violin | plays the piano | studies Spanish | trains for a race | draws | reads | dances | plays chess | walks the dog | does homework | swims | works in the garden | cooks | watches films"

# things one has many of, and what they are kept in
THINGS = [
    ("marbles | stickers | trading cards | toy cars | building blocks | stamps | coins | dolls | puzzles | comic books | beads | action figures | board games | postcards | seashells | balloons | kites | badges | key rings", "boxes | bags | albums | drawers | jars"),
    ("cookies | cupcakes | muffins | doughnuts | sandwiches | pancakes | brownies | pretzels | bagels | pies | rolls | candies | lollipops | chocolate bars | dumplings | tarts | waffles | caramels | scones", "boxes | trays | bags | tins | plates"),
    ("apples | oranges | pears | peaches | lemons | tomatoes | potatoes | carrots | onions | pumpkins | melons | plums | mangoes | bananas | cucumbers | eggs | strawberries | peppers | figs | walnuts", "baskets | crates | bags | boxes | sacks"),
    ("pencils | pens | notebooks | crayons | erasers | markers | folders | rulers | envelopes | paper clips | candles | buttons | paintbrushes | bookmarks | light bulbs | batteries | nails | screws | tiles", "packs | boxes | drawers | cartons | cases"),
    ("roses | tulips | daisies | sunflowers | seedlings | lilies | orchids | ferns | flower pots | bricks | planks | stones | saplings", "rows | crates | trays | beds"),
]  # fmt: skip

# what is bought, lowest and highest price in dollars
GOODS = {
    "shirt": (8, 30), "pair of socks": (2, 9), "hat": (6, 25), "scarf": (7, 28), "jacket": (30, 95), "book": (5, 24),
    "notebook": (1, 6), "pen": (1, 4), "backpack": (18, 60), "lamp": (12, 55), "chair": (20, 90), "table": (45, 180),
    "pizza": (7, 18), "burger": (4, 12), "salad": (4, 11), "coffee": (2, 6), "bottle of juice": (2, 6),
    "bag of rice": (3, 14), "loaf of bread": (2, 6), "carton of milk": (2, 5), "box of cereal": (3, 7),
    "jar of honey": (4, 12), "bag of flour": (2, 8), "ticket": (5, 40), "toy": (4, 25), "game": (15, 60),
    "ball": (4, 20), "bat": (10, 45), "helmet": (15, 50), "bicycle tyre": (12, 35), "bucket of paint": (10, 45),
    "brush": (2, 12), "hammer": (8, 25), "plant": (3, 20), "bag of soil": (4, 15), "bouquet": (8, 35), "cake": (9, 40),
    "blanket": (12, 50), "pillow": (8, 30), "towel": (4, 18), "mug": (3, 14), "plate": (2, 12), "candle": (2, 15),
    "poster": (3, 16), "puzzle": (6, 25), "umbrella": (8, 28), "phone case": (6, 24), "charger": (9, 35),
}  # fmt: skip

# what people are compared by, and the verb that goes with it
MEASURES = [
    ("stickers", "have"), ("marbles", "own"), ("books", "have"), ("coins", "collect"), ("pages", "read"),
    ("points", "score"), ("goals", "score"), ("miles", "run"), ("push-ups", "do"), ("cans", "collect"),
    ("cookies", "bake"), ("fish", "catch"), ("trees", "plant"), ("letters", "write"), ("cards", "own"), ("laps", "swim"),
    ("apples", "pick"), ("tickets", "sell"), ("photos", "take"), ("shells", "find"), ("emails", "send"),
    ("boxes", "carry"), ("bracelets", "make"), ("songs", "write"), ("stamps", "collect"), ("shirts", "fold"),
    ("kilometres", "cycle"), ("minutes", "practise"), ("words", "type"), ("steps", "climb"),
]  # fmt: skip

IRREGULAR = {
    "have": ("has", "had"), "do": ("does", "did"), "buy": ("buys", "bought"), "sell": ("sells", "sold"),
    "give": ("gives", "gave"), "lose": ("loses", "lost"), "find": ("finds", "found"), "get": ("gets", "got"),
    "make": ("makes", "made"), "take": ("takes", "took"), "put": ("puts", "put"), "pay": ("pays", "paid"),
    "spend": ("spends", "spent"), "read": ("reads", "read"), "run": ("runs", "ran"), "drive": ("drives", "drove"),
    "ride": ("rides", "rode"), "write": ("writes", "wrote"), "swim": ("swims", "swam"), "catch": ("catches", "caught"),
    "go": ("goes", "went"), "cost": ("costs", "cost"), "keep": ("keeps", "kept"), "break": ("breaks", "broke"),
    "leave": ("leaves", "left"), "cut": ("cuts", "cut"), "send": ("sends", "sent"), "hold": ("holds", "held"),
    "throw": ("throws", "threw"), "begin": ("begins", "began"), "come": ("comes", "came"), "bring": ("brings", "brought"),
    "let": ("lets", "let"), "plan": ("plans", "planned"), "travel": ("travels", "travelled"), "drop": ("drops", "dropped"),
}  # fmt: skip

LEADS = "so | that means | this means | then | therefore, | thus, | now | next, | as a result,"

SAY = {
    # what one person holds, and what happens to it
    "has": "{s} <have> {n} {things} | {s} <own> {n} {things} | {s} <start> the week with {n} {things} | {s} <keep> {n} {things} in a cupboard | there <be:p> {n} {things} on {name}'s table | {s} <begin> the day with {n} {things} | {name}'s collection <hold:o> {n} {things} | in the morning {s} <have> {n} {things} | {s} <bring> {n} {things} to school",
    "buys": "{s} <buy> {m} more {things} | at {place} {s} <buy> another {m} | then {s} <buy> {m} more | {s} <go> to {place} and <buy> {m} more {things} | on {day} {s} <buy> {m} extra {things}",
    "finds": "{s} <find> {m} more under the bed | later {s} <find> {m} {things} in an old box | while cleaning, {s} <find> {m} more | {s} <find> another {m} {things} in the garage",
    "receives": "{his} {kin} <give:o> {him} {m} more | {s} <get> {m} {things} from {his} {kin} | for {his} birthday {s} <receive> {m} more {things} | {s} <get> {m} {things} as a present | {his} {kin} <hand:o> {him} {m} {things}",
    "packs": "{s} <buy> {k} packs of {things} with {m} in each pack | {s} also <get> {k} bags that hold {m} {things} each | then {s} <buy> {k} boxes, and each box <have:o> {m} {things} | {s} <order> {k} cases of {m} {things} each",
    "dozens": "{s} <buy> {k} dozen more | {his} {kin} <bring:o> {k} dozen {things} | {s} <order> {k} dozen {things}",
    "daily": "for the next {k} days {s} <get> {m} more every day | {s} <collect> {m} {things} a day for {k} days | every day for {k} days, {s} <add> {m} {things} | each of the next {k} days {s} <get> {m} {things}",
    "doubles": "then {s} <buy> {times} as many {things} as {he} already {had} | {his} {kin} <give:o> {him} {times} as many {things} as {he} {had}",
    "sells": "{s} <sell> {m} of them | on {day} {s} <sell> {m} {things} | {s} <sell> {m} {things} at {place} | a customer <take:o> {m} of the {things}",
    "gives": "{s} <give> {m} {things} to each of {his} {k} friends | {s} <give> {k} friends {m} {things} each | {k} children <come:p> by and {s} <give> each of them {m} | {s} <hand> out {m} {things} to each of {k} cousins",
    "gives one": "{s} <give> {m} to {his} {kin} | {s} <let> {his} {kin} have {m} of the {things} | {his} {kin} <take:o> {m} of them | {s} <donate> {m} {things} to the school",
    "loses": "{s} <lose> {m} of them | on the way home {s} <lose> {m} {things} | {m} of the {things} <get:p> lost | {m} of them <break:p>, so {s} <throw> those away | the {pet} <ruin:o> {m} of the {things}",
    "fraction": "{s} <give> {part} of {his} {things} to {his} {kin} | {s} <sell> {part} of the {things} | {part} of the {things} <go:p> to {his} {kin} | {s} <use> {part} of what {he} {had} | {s} <put> {part} of the {things} aside for {his} {kin}",
    "percent": "{q} of the {things} <be:p> damaged and {s} <throw> them away | {s} <sell> {q} of {his} {things} | {s} <give> away {q} of the {things} | {q} of the {things} <be:p> of no use",
    "price": "{s} <sell> all the remaining {things} for {p} each | {s} <sell> the rest at {p} each | the rest are sold for {p} a piece | {s} <get> {p} for every one that is left",
    "shares": "{s} <share> the rest equally among {k} friends | {s} <put> the rest into {k} {boxes}, the same number in each | the remaining {things} are split evenly between {k} people | {s} <divide> what is left into {k} equal groups",
    "groups": "{s} <want> to pack them in {boxes} of {k} | each of {his} {boxes} <hold:o> exactly {k} {things} | {s} <fill> as many {boxes} as possible with {k} {things} each",
    "per day use": "{s} <use> {k} of them every day | from then on, {k} {things} are used a day",
    # comparisons
    "first": "{s} <{verb}> {n} {things} | {s} <{verb}> {n} {things} {when} | {when}, {s} <{verb}> {n} {things}",
    "times": "{s} <{verb}> {times} as many {things} as {other} | {s} <{verb}> {times} the number of {things} that {other} <do:o> | {s} <{verb}> {times} as many as {other}",
    "part": "{s} <{verb}> {part} as many {things} as {other} | {s} <{verb}> only {part} as many {things} as {other} <do:o>",
    "more": "{s} <{verb}> {m} more {things} than {other} | {s} <{verb}> {m} {things} more than {other} <do:o> | compared with {other}, {s} <{verb}> {m} more {things}",
    "fewer": "{s} <{verb}> {m} fewer {things} than {other} | {s} <{verb}> {m} {things} fewer than {other} <do:o> | {s} <{verb}> {m} less than {other}",
    "percent more": "{s} <{verb}> {q} more {things} than {other} | {s} <{verb}> {q} more than {other} <do:o>",
    "more times": "{s} <{verb}> {m} more than {times} the number of {things} {other} <{verb}:o> | {s} <{verb}> {m} more than {times} as many {things} as {other}",
    "combined": "{s} <{verb}> {m} fewer {things} than {other} and {third} together | {s} <{verb}> {m} {things} less than {other} and {third} combined",
    # money
    "shop": "{s} <go> to {place} and <buy> {list} | at {place}, {s} <buy> {list} | {s} <buy> {list} | {s} <need> new things and <buy> {list} at {place} | {s} <order> {list} | {s} <pick> out {list} at {place}",
    "purse": "{s} <have> {p} | {s} <take> {p} along | {s} <save> up {p} | {s} <have> {p} in {his} wallet | {his} {kin} <give:o> {him} {p} to spend | {s} <get> {p} for {his} birthday",
    "discount": "{s} <have> a coupon for {q} off the whole bill | everything <be:o> {q} off that day | the shop <take:o> {q} off the total | because of a sale {s} <get> a discount of {q}",
    "coupon": "{s} <use> a voucher worth {p} | {s} <have> a coupon for {p} off | the cashier <take:o> {p} off the bill",
    "tax": "sales tax of {q} <be:o> added to the bill | {s} also <pay> {q} tax | there <be:o> a tax of {q} on the purchase",
    "tip": "{s} <leave> a tip of {q} | {s} <add> a {q} tip | {s} <give> the staff {q} of the bill as a tip",
    "fee": "delivery <cost:o> {p} | {s} <pay> a delivery fee of {p} | there <be:o> also a service charge of {p} | gift wrapping <cost:o> another {p}",
    "note": "{s} <pay> with {p} | {s} <hand> the cashier {p} | {s} <give> the seller {p}",
    "refund": "later {s} <return> one {thing} and <get> {his} money back | one {thing} <be:o> faulty, so {s} <get> a refund for it",
    "split": "the cost <be:o> shared equally by {k} people | {k} people <pay:p> equal parts of it | {k} friends <agree:p> to share the cost evenly",
    "wage": "{s} <work> as a {job} and <earn> {p} an hour | {s} <be> a {job} who <earn:o> {p} per hour | as a {job}, {s} <make> {p} an hour | {s} <get> {p} for every hour of work",
    "hours": "{s} <work> {n} hours a day, {k} days a week | {s} <work> {n} hours on each of {k} days a week | every week {s} <work> {k} days of {n} hours each",
    "overtime": "any hour beyond {n} hours a week <be:o> paid at {p} | after {n} hours, the pay <be:o> {p} an hour",
    "second job": "on weekends {s} also <earn> {p} by {chore} | {s} <make> another {p} a week by {chore}",
    "rent": "{s} <spend> {p} a week on {need} | each week {s} <need> {p} for {need} | {s} <pay> {p} for {need} every week",
    "saves": "{s} <save> {q} of what {he} <earn> | {s} <put> {q} of the money into a savings account",
    "goal": "{s} <want> to buy a {thing} that <cost:o> {p} | {s} <be> saving for a {thing} which <cost:o> {p} | a {thing} {he} <want> <cost:o> {p}",
    "weekly": "{s} <save> {p} every week | {his} allowance <be:o> {p} a week and {he} <save> all of it | each week {s} <put> {p} into a jar",
    "leg": "{s} <drive> for {n} hours at {v} miles per hour | {s} <travel> {n} hours at a speed of {v} miles per hour | for {n} hours {s} <go> {v} miles an hour",
    "trip": "{s} <drive> to {town}, which is {n} miles away | {town} is {n} miles from {name}'s home | the way from {name}'s home to {town} is {n} miles",
}  # fmt: skip

WORK = {
    "now": "{s} <have> {c} {things} | after that {s} <have> {c} {things} | {s} now <have> {c} {things} | adding these, {s} <have> {c} {things} | the number of {things} is {c} | in all there are {c} {things} | that brings {him} to {c} {things}",
    "left": "{s} <have> {c} {things} left | after that there are {c} {things} left | this leaves {him} with {c} {things} | {s} still <have> {c} {things} | the number of {things} remaining is {c} | {c} {things} remain | subtracting these, {s} <have> {c} {things}",
    "added": "the new {things} come to {c} | {s} <get> {c} {things} this way | there are {c} new {things} | that is {c} more {things} | {s} <add> {c} {things}",
    "gone": "{c} {things} are gone | {s} no longer <have> {c} {things} | that takes away {c} {things} | the number to take off is {c}",
    "sale": "{s} <get> {c} for the {things} | selling them brings {c} | {s} <make> {c} from the {things} | the {things} sell for a total of {c}",
    "each": "each gets {c} {things} | there are {c} {things} for each | every share is {c} {things} | dividing evenly gives {c} {things} each",
    "in full": "the full {boxes} hold {c} {things} | {c} {things} go into {boxes}",
    "days": "they last {c} days | it takes {c} days to use them up | the {things} are enough for {c} days",
    "amount": "{s} <{verb}> {c} {things} | the number of {things} for {name} is {c} | {name}: {c} {things} | since {why}, {s} <{verb}> {c} {things} | {s} <{verb}> a total of {c} {things}",
    "sum": "together they <{verb}:p> {c} {things} | in total, they <{verb}:p> {c} {things} | altogether there are {c} {things} | adding everything, we get {c} {things} | the total is {c} {things} | combined, that is {c} {things}",
    "gap": "the difference is {c} {things} | {name} <{verb}:o> {c} more {things} | there are {c} more {things} for {name}",
    "mean": "the average is {c} {things} | on average, that is {c} {things} each | each of them <{verb}:o> {c} {things} on average",
    "cost": "the {item} cost {c} | {s} <spend> {c} on the {item} | the cost of the {item} is {c} | for the {item} {s} <pay> {c} | the price of the {item} comes to {c}",
    "bill": "the bill is {c} | in total {s} <spend> {c} | all together the purchase costs {c} | the total cost is {c} | adding these up gives {c} | everything together costs {c}",
    "off": "the discount is {c} | {s} <save> {c} | the price drops by {c} | {q} off means {c} less",
    "new price": "after the discount the price is {c} | {s} only <have> to pay {c} | this brings the bill down to {c} | the reduced price is {c}",
    "extra": "the {kind} is {c} | {s} <pay> {c} for the {kind} | the {kind} adds {c} | the {kind} comes to {c}",
    "with extra": "with the {kind} the total is {c} | including the {kind}, {s} <pay> {c} | adding the {kind} gives {c}",
    "change": "{s} <get> {c} back | {his} change is {c} | the change is {c} | the cashier returns {c}",
    "money left": "{s} <have> {c} left | {s} <be> left with {c} | this leaves {c} | the money left over is {c} | {s} still <have> {c}",
    "money now": "{s} now <have> {c} | in total that is {c} | altogether {s} <have> {c} | the sum is {c}",
    "pays each": "each person pays {c} | everyone's share is {c} | split evenly, that is {c} each",
    "week hours": "{s} <work> {c} hours a week | the hours in a week are {c} | that is {c} hours every week",
    "pay": "{s} <earn> {c} | {his} pay for {span} is {c} | {s} <make> {c} in {span} | for {span} {s} <get> {c}",
    "weeks": "{s} <need> {c} weeks | it takes {c} weeks | the number of weeks is {c}",
    "missing": "{s} still <need> {c} | the amount missing is {c} | {s} <have> to save {c} more",
    "distance": "{s} <cover> {c} miles | the distance is {c} miles | that part is {c} miles long | in that time {s} <travel> {c} miles",
    "hours taken": "it takes {c} hours | the time is {c} hours | {s} <need> {c} hours for it",
    "speed": "the average speed is {c} miles per hour | {s} <travel> at {c} miles per hour on average",
    "are": "there are {c} {what} | the number of {what} is {c} | that is {c} {what} | we get {c} {what} | this gives {c} {what}",
}  # fmt: skip

ASK = {
    "left": "how many {things} {does} {s} have left | how many {things} are left | how many {things} {does} {s} still have | what is the number of {things} {s} <have> at the end | how many {things} remain",
    "now": "how many {things} {does} {s} have now | how many {things} {does} {s} have in total | how many {things} {does} {s} have at the end | how many {things} are there altogether",
    "sale": "how much money {does} {s} make | how many dollars {does} {s} get | how much {does} {s} earn from the sale, in dollars",
    "each": "how many {things} does each one get | how many {things} are in each share | how many {things} go to each",
    "over": "how many {things} are left over | how many {things} do not fit in a full one",
    "days": "how many days will the {things} last | for how many days are there enough {things}",
    "sum": "how many {things} {do} they {verb} in total | how many {things} {do} all of them {verb} together | what is the total number of {things} | how many {things} {do} the {count} of them {verb} altogether",
    "gap": "how many more {things} {did} {a} {verb} than {b} | what is the difference between the number of {things} of {a} and {b}",
    "mean": "how many {things} {do} they {verb} on average | what is the average number of {things}",
    "amount": "how many {things} {does} {name} {verb} | what is the number of {things} that {name} <{verb}:o>",
    "cost": "how much {does} {s} pay in total | how much {does} {s} spend | what is the total cost, in dollars | how many dollars {does} {s} spend altogether | how much is the final bill",
    "change": "how much change {does} {s} get | how much money {does} {s} get back | what is {his} change",
    "money left": "how much money {does} {s} have left | how many dollars are left | how much {does} {s} have left over",
    "pays each": "how much does each person pay | what is each person's share | how many dollars does everyone pay",
    "pay": "how much {does} {s} earn in {span} | how much money {does} {s} make in {span} | what is {his} pay for {span}",
    "weeks": "how many weeks {does} {s} need to save enough | how many weeks will it take | after how many weeks can {s} buy the {thing}",
    "saved": "how much money {does} {s} have after {k} weeks | how much has {s} saved after {k} weeks | what are {his} savings after {k} weeks",
    "distance": "how many miles {does} {s} travel in total | how far {does} {s} travel | what is the total distance in miles",
    "time": "how many hours {does} {s} need in total | how long {does} {s} travel, in hours",
    "speed": "what is the average speed of the whole trip | how fast {does} {s} travel on average, in miles per hour",
}  # fmt: skip
